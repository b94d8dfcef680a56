"""Where the pixels of a split are kept during a run: in device memory, in RAM, or on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate import Accelerator

from accel_train.config.schema import Data
from accel_train.data.sources.arrays import ArraySource
from accel_train.data.sources.cache import CachedImages
from accel_train.data.sources.splits import Source, unwrap_subset
from accel_train.data.sources.user.dataset import UserDataset
from accel_train.errors import UserError

DEVICE_SHARE = 4  # a split may take 1/4 of the free device memory: the model needs the rest
HOST_SHARE = 2  # and 1/2 of the host's free memory, which all its processes share

Place = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class Placement:
    """How the batches of a split are loaded, as printed at the start of a run."""

    place: Place
    """disk: fetched image by image, from files or computed by the source."""
    bytes: int | None
    """Size of all pixels in memory, or of the cache file. None: not known without decoding."""
    workers: int
    """Worker processes of each training process."""
    prefetch: int
    """Batches that each worker loads ahead."""

    def __str__(self) -> str:
        where = {"device": "on the device", "host": "in host memory", "disk": "on disk"}[self.place]
        size = "" if self.bytes is None else f"{_text(self.bytes)} "
        workers = f"{self.workers} worker{'s' * (self.workers != 1)}" if self.workers else "no workers"
        prefetch = f", each {self.prefetch} batches ahead" if self.workers else ""
        threads = torch.get_num_threads()
        return f"{size}{where}, {workers}{prefetch}, {threads} thread{'s' * (threads > 1)}"


def choose_place(
    data: Data, source: Source, accelerator: Accelerator, *, per_image: bool, local_processes: int
) -> tuple[Place, int | None]:
    """(place of the pixels of `source`, their size in bytes), the same on every process. Collective.

    `per_image`: workers transform each image separately before it becomes part of a batch. Raises UserError if the
    place that --data.placement names is not possible.
    """
    requested, device = data.placement, accelerator.device
    needed = pixel_bytes(source)
    if needed is None:
        advice = "the images are files of different sizes: cache them (accel-train cache-data), or use auto"
        return _choose_for_encoded(data, source, accelerator, advice)
    if per_image:
        if requested == "device":
            raise UserError(
                "--data.placement device: crop=resized and augment.policy transform each image separately on the "
                "host; use host or auto, or turn them off."
            )
        return "host" if _in_ram(source) else "disk", needed
    if requested == "disk":
        return "disk", needed
    free = free_device_bytes(device)
    fits_here = {
        "device": needed <= (free if requested == "device" else free // DEVICE_SHARE),
        "host": _in_ram(source) or needed <= free_host_bytes() // HOST_SHARE // local_processes,
    }
    fits = {place: all_agree(accelerator, fit) for place, fit in fits_here.items()}
    if device.type != "cpu" and requested != "host":
        if fits["device"]:
            return "device", needed
        if requested == "device":
            raise UserError(
                f"--data.placement device: the images take {_text(needed)}, but a device has only {_text(free)} free; "
                "use host or auto."
            )
    if requested == "host" and not fits["host"]:
        raise UserError(
            f"--data.placement host: the images take {_text(needed)} in each process, more than half of the free "
            "memory; use disk."
        )
    return "host" if fits["host"] else "disk", needed


def _choose_for_encoded(data: Data, source: Source, accelerator: Accelerator, advice: str) -> tuple[Place, int | None]:
    """As `choose_place`, for images that are decoded one by one. `advice`: of the error message."""
    held, _ = unwrap_subset(source)
    if isinstance(held, CachedImages):
        if data.placement == "device":
            raise UserError(
                "--data.placement device: the images of a cache differ in size and are cropped on the host; "
                "use host or auto."
            )
        if data.placement != "host":
            return "disk", held.file.bytes
        if not all_agree(accelerator, held.file.bytes <= free_host_bytes() // HOST_SHARE):
            raise UserError(
                f"--data.placement host: the cache has {_text(held.file.bytes)}, more than half of the free memory; "
                "use auto."
            )
        held.file.read_ahead()
        return "host", held.file.bytes
    if isinstance(held, UserDataset):
        advice = "the images come from your own Dataset, item by item: use auto"
    if data.placement in ("device", "host"):
        raise UserError(f"--data.placement {data.placement}: {advice}.")
    return "disk", None


def pixel_bytes(source: Source) -> int | None:
    """Size in bytes of all images as uint8 tensors; None if they are encoded or differ in size."""
    if not source.in_memory:
        return None
    return len(source) * source.fetch([0])[0].numel()


def _in_ram(source: Source) -> bool:
    """Whether the images are already in this process's memory, rather than computed on request."""
    return isinstance(unwrap_subset(source)[0], ArraySource)


def all_agree(accelerator: Accelerator, value: bool) -> bool:
    """Whether `value` is true on every process. Collective."""
    if accelerator.num_processes == 1:
        return value
    votes = accelerator.gather(torch.tensor([value], device=accelerator.device))
    return bool(votes.all())


def free_host_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def free_device_bytes(device: torch.device) -> int:
    """Free memory of an accelerator in bytes; 0 on a CPU and where it is not known."""
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    module: Any = getattr(torch, device.type)
    return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else 0


def _text(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
