"""Where the pixels of a split lie while it is used: on the device, in host memory, or where they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate import Accelerator

from accel_train.config.schema import Data
from accel_train.data.sources.arrays import ArraySource
from accel_train.data.sources.cache import CachedImages
from accel_train.data.sources.splits import Source, unwrap_subset
from accel_train.errors import UserError

DEVICE_SHARE = 4  # a split may take this part, a quarter, of the device's free memory: the model's work needs the rest
HOST_SHARE = 2  # and half of the host's, which all its processes share

Place = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class Placement:
    """How the batches of a split are made; said at the start of a run."""

    place: Place
    """disk: fetched image by image, from files or as a source makes them."""
    bytes: int | None
    """Of all pixels, where they lie in memory; of the file of a cache. None: not known without decoding."""
    workers: int
    """Processes that load images, for each training process."""
    prefetch: int
    """Batches that each of them is ahead."""
    decode_on: Literal["host", "device"] = "host"
    """Where JPEG files are decoded."""

    def __str__(self) -> str:
        where = {"device": "on the device", "host": "in host memory", "disk": "on disk"}[self.place]
        where += ", decoded on the device" * (self.decode_on == "device")
        size = "" if self.bytes is None else f"{_text(self.bytes)} "
        workers = f"{self.workers} worker{'s' * (self.workers != 1)}" if self.workers else "no workers"
        ahead = f", each {self.prefetch} batches ahead" if self.workers else ""
        threads = torch.get_num_threads()
        return f"{size}{where}, {workers}{ahead}, {threads} thread{'s' * (threads > 1)}"


def choose_place(
    data: Data, source: Source, accelerator: Accelerator, *, per_image: bool, local_processes: int
) -> tuple[Place, int | None]:
    """(where the pixels of `source` are to lie, their bytes), the same on every process: all must call it at once.

    `per_image`: each image is turned by itself, in workers, before it makes a batch. Raises UserError if
    --data.placement asks for what cannot be.
    """
    asked, device = data.placement, accelerator.device
    needed = pixel_bytes(source)
    if needed is None:
        whole = "the images are files of many sizes: cache them (accel-train cache-data), or leave it auto"
        return _encoded(data, source, accelerator, whole)
    if per_image:
        if asked == "device":
            raise UserError(
                "--data.placement device: crop=resized and augment.policy turn each image by itself, on the host: "
                "choose host or auto, or do without them."
            )
        return "host" if _owned(source) else "disk", needed
    if asked == "disk":
        return "disk", needed
    free = free_device_bytes(device)
    shares = {
        "device": needed <= (free if asked == "device" else free // DEVICE_SHARE),
        "host": _owned(source) or needed <= free_host_bytes() // HOST_SHARE // local_processes,
    }
    fits = {place: all_agree(accelerator, fit) for place, fit in shares.items()}
    if device.type != "cpu" and asked != "host":
        if fits["device"]:
            return "device", needed
        if asked == "device":
            raise UserError(
                f"--data.placement device: the images take {_text(needed)}; a device has only {_text(free)} free: "
                "choose host or auto."
            )
    if asked == "host" and not fits["host"]:
        raise UserError(
            f"--data.placement host: the images take {_text(needed)} in each process, more than half of what is free: "
            "choose disk."
        )
    return "host" if fits["host"] else "disk", needed


def _encoded(data: Data, source: Source, accelerator: Accelerator, advice: str) -> tuple[Place, int | None]:
    held, _ = unwrap_subset(source)
    if isinstance(held, CachedImages):
        if data.placement == "device":
            raise UserError(
                "--data.placement device: the images of a cache differ in size and are cropped on the host: "
                "choose host, or leave it auto."
            )
        if data.placement != "host":
            return "disk", held.file.bytes
        if not all_agree(accelerator, held.file.bytes <= free_host_bytes() // HOST_SHARE):
            raise UserError(
                f"--data.placement host: the cache has {_text(held.file.bytes)}, more than half of the memory that is "
                "free: leave it auto."
            )
        held.file.read_ahead()
        return "host", held.file.bytes
    if data.placement in ("device", "host"):
        raise UserError(f"--data.placement {data.placement}: {advice}.")
    return "disk", None


def pixel_bytes(source: Source) -> int | None:
    """Bytes of all images of a source as uint8 tensors of one size; None if they are encoded or of many sizes."""
    if not source.in_memory:
        return None
    return len(source) * source.fetch([0])[0].numel()


def _owned(source: Source) -> bool:
    """Whether the images lie in this process's memory already, and are not made when they are asked for."""
    return isinstance(unwrap_subset(source)[0], ArraySource)


def all_agree(accelerator: Accelerator, found: bool) -> bool:
    """Whether `found` is true on every process."""
    if accelerator.num_processes == 1:
        return found
    votes = accelerator.gather(torch.tensor([found], device=accelerator.device))
    return bool(votes.all())


def free_host_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def free_device_bytes(device: torch.device) -> int:
    """Free memory of an accelerator; 0 if it cannot be known, and on a CPU."""
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    module: Any = getattr(torch, device.type)
    return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else 0


def _text(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
