"""Where the pixels of a split are kept during a run: in device memory, in RAM, or on disk.

The batches of a split in memory are made here by index_select, without workers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor

from accel_train.data.batch_transform import AugmentParameters
from accel_train.data.order import IndexSampler
from accel_train.data.sources.arrays import ArraySource
from accel_train.data.sources.splits import Source, unwrap_subset

DEVICE_SHARE = 4  # a split may take 1/4 of the free device memory: the model needs the rest
HOST_SHARE = 2  # and 1/2 of the host's free memory, which all its processes share

Place = Literal["device", "host", "disk"]
"""Where the pixels of a split are kept. disk: fetched image by image, from files or computed by the source."""
PLACES: dict[Place, str] = {"device": "on the device", "host": "in host memory", "disk": "on disk"}
"""The places, in words."""


def choose_place(source: Source, accelerator: Accelerator, *, per_image: bool) -> Place:
    """The fastest place with room for the pixels of `source`, the same on every process. Collective.

    `per_image`: workers transform each image separately before it becomes part of a batch.
    """
    if not source.in_memory:
        return "disk"
    if per_image:
        return "host" if _in_ram(source) else "disk"
    needed = len(source) * torch.as_tensor(source.fetch([0])[0]).nbytes
    device, processes_here = accelerator.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    fits_here: dict[Place, bool] = {
        "device": device.type != "cpu" and needed <= free_device_bytes(device) // DEVICE_SHARE,
        "host": _in_ram(source) or needed <= free_host_bytes() // HOST_SHARE // processes_here,
    }
    fits = [place for place, fit in fits_here.items() if all_agree(accelerator, fit)]
    return fits[0] if fits else "disk"


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


COPY_IMAGES = 1024  # images fetched at a time while a dataset is copied into one tensor
FETCH_BYTES = 1 << 20  # of images fetched at a time for batches: many batches of small images


class PixelTensor:
    """All images of a source as one tensor in the memory format of the model's input."""

    def __init__(self, source: Source, device: torch.device, memory_format: torch.memory_format) -> None:
        """Copies the images, unless they are already there in this format."""
        held, ids = unwrap_subset(source)
        self.channels_last = memory_format == torch.channels_last
        self.ids: Tensor | None = None  # the row of each image; None: in order
        if (
            isinstance(held, ArraySource)
            and device.type == "cpu"
            and (not self.channels_last or held.pixels.shape[1] == 1)
        ):
            self.rows, self.ids = held.pixels, ids
            self.channels_last = False  # with one channel both formats are the same
            return
        first = source.fetch([0])
        assert isinstance(first, Tensor), "images of different sizes do not fit into one tensor"
        shape = self._as_stored(first).shape[1:]
        self.rows = torch.empty((len(source), *shape), dtype=first.dtype, device=device)
        for start in range(0, len(source), COPY_IMAGES):
            images = source.fetch(range(start, min(start + COPY_IMAGES, len(source))))
            assert isinstance(images, Tensor)
            self.rows[start : start + len(images)] = self._as_stored(images)

    def _as_stored(self, images: Tensor) -> Tensor:
        return images.permute(0, 2, 3, 1) if self.channels_last else images

    def row_numbers(self, ids: Tensor) -> Tensor:
        """The rows, for `select`, of the images `ids` (int64 [b], on the host)."""
        return ids if self.ids is None else self.ids.index_select(0, ids)

    def select(self, row_numbers: Tensor) -> Tensor:
        """The images of these rows, [b, C, H, W] on the device of the pixels."""
        images = self.rows.index_select(0, row_numbers)
        return images.permute(0, 3, 1, 2) if self.channels_last else images


class MemoryLoader:
    """Yields one process's slices of a sampler's global micro-batches, as dicts like those of `workers.BatchDataset`.

    Numbers, keys and labels are computed for some thousand samples at once and then divided into batches. If the
    images are in device memory, only these are copied to the device.
    """

    def __init__(
        self,
        source: Source,
        sampler: IndexSampler,
        accelerator: Accelerator,
        *,
        seed: int,
        pixels_device: torch.device,
        memory_format: torch.memory_format,
        draw_parameters: AugmentParameters | None = None,
    ) -> None:
        """`pixels_device`: where the images are kept, the accelerator's device or the CPU. The result of
        `draw_parameters` is added to each batch as "parameters"."""
        self.labels, self.sampler, self.seed = source.labels, sampler, seed
        self.process, self.processes = accelerator.process_index, accelerator.num_processes
        self.device, self.draw_parameters = accelerator.device, draw_parameters
        self.pixels = PixelTensor(source, pixels_device, memory_format)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        share = self.sampler.batch_size // self.processes  # of one micro-batch
        for block in self.sampler.blocks():
            keys = block.keys(self.seed)
            ids, weights, keys, draw_ids = (
                values.view(-1, self.processes, share)[:, self.process].reshape(-1)
                for values in (block.ids, block.weights, keys, block.draw_ids(keys))
            )
            columns = {"labels": self.labels.index_select(0, ids), "ids": ids, "keys": keys, "weights": weights}
            if self.draw_parameters is not None:
                columns["parameters"] = self.draw_parameters(keys, weights)
            columns = {name: self._to_device(values, self.device) for name, values in columns.items()}
            row_numbers = self._to_device(self.pixels.row_numbers(ids), self.pixels.rows.device)
            step = max(1, FETCH_BYTES // (share * self.pixels.rows[0].numel())) * share
            for first in range(0, len(ids), step):
                images = self._to_device(self.pixels.select(row_numbers[first : first + step]), self.device)
                for start in range(0, len(images), share):
                    rows = slice(first + start, first + start + share)
                    batch: dict[str, Any] = {name: values[rows] for name, values in columns.items()}
                    yield {"images": images[start : start + share], "host_ids": draw_ids[rows].numpy(), **batch}

    @staticmethod
    def _to_device(values: Tensor, device: torch.device) -> Tensor:
        if values.device == device:
            return values
        return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)
