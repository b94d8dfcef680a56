"""Batches of a set that lies in memory as uint8, the host's or the device's: by index_select, without workers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from accel_train.data.order.keyed import hashed, key
from accel_train.data.order.samplers import Order
from accel_train.data.sources.arrays import Arrays
from accel_train.data.sources.splits import Source, owner
from accel_train.data.transforms.parameters import AugmentParameters

AT_ONCE = 1024  # images that are fetched at a time when a set is laid out
FETCHED_BYTES = 1 << 20  # of images that are fetched at a time when batches are made: many batches of small images


class Pixels:
    """All images of a source as one tensor, laid out as the model takes them."""

    def __init__(self, source: Source, device: torch.device, memory_format: torch.memory_format) -> None:
        """Copies them, but for those that lie there already, as they should."""
        held, ids = owner(source)
        self.channels_last = memory_format == torch.channels_last
        self.ids: Tensor | None = None  # where each image lies; None: in their own order
        if isinstance(held, Arrays) and device.type == "cpu" and (not self.channels_last or held.pixels.shape[1] == 1):
            self.rows, self.ids = held.pixels, ids
            self.channels_last = False  # one channel lies the same way in both
            return
        first = source.fetch([0])
        assert isinstance(first, Tensor), "images of different sizes lie in no tensor"
        shape = self._laid_out(first).shape[1:]
        self.rows = torch.empty((len(source), *shape), dtype=torch.uint8, device=device)
        for at in range(0, len(source), AT_ONCE):
            some = source.fetch(range(at, min(at + AT_ONCE, len(source))))
            assert isinstance(some, Tensor)
            self.rows[at : at + len(some)] = self._laid_out(some)

    def _laid_out(self, images: Tensor) -> Tensor:
        return images.permute(0, 2, 3, 1) if self.channels_last else images

    def places(self, ids: Tensor) -> Tensor:
        """Where the images `ids` (int64 [b], on the host) lie, for `at`."""
        return ids if self.ids is None else self.ids.index_select(0, ids)

    def at(self, places: Tensor) -> Tensor:
        """Images at `places`, on the device of the pixels: uint8 [b, C, H, W]."""
        images = self.rows.index_select(0, places)
        return images.permute(0, 3, 1, 2) if self.channels_last else images


class MemoryLoader:
    """One process's slices of the global micro-batches of an order, each a batch as `loading.BatchedSet` has them.

    Numbers, keys and labels are computed for some thousand samples at once and cut; only they travel to the device.
    """

    def __init__(
        self,
        source: Source,
        order: Order,
        *,
        seed: int,
        process: int,
        processes: int,
        device: torch.device,
        pixels_device: torch.device,
        memory_format: torch.memory_format,
        draws: AugmentParameters | None = None,
    ) -> None:
        """`device` takes the batches; `pixels_device` is where the images lie, that one or the CPU. What `draws` draws
        of each sample comes with it as "parameters"."""
        self.labels, self.order, self.seed = source.labels, order, seed
        self.process, self.processes = process, processes
        self.device, self.draws = device, draws
        self.pixels = Pixels(source, pixels_device, memory_format)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        share = self.order.batch_size // self.processes  # of one micro-batch
        for stretch in self.order.stretches():
            ids, weights = (
                values.view(-1, self.processes, share)[:, self.process].reshape(-1)
                for values in (stretch.ids, stretch.weights)
            )
            columns = {
                "labels": self.labels.index_select(0, ids),
                "ids": ids,
                "keys": hashed(key(self.seed, stretch.epoch, "augment"), ids),
                "weights": weights,
            }
            if self.draws is not None:
                columns["parameters"] = self.draws(columns["keys"], weights)
            columns = {name: self._sent(values, self.device) for name, values in columns.items()}
            places = self._sent(self.pixels.places(ids), self.pixels.rows.device)
            some = max(1, FETCHED_BYTES // (share * self.pixels.rows[0].numel())) * share
            for start in range(0, len(ids), some):
                images = self._sent(self.pixels.at(places[start : start + some]), self.device)
                for at in range(0, len(images), share):
                    batch = {name: values[start + at : start + at + share] for name, values in columns.items()}
                    yield {"images": images[at : at + share], **batch}

    @staticmethod
    def _sent(values: Tensor, device: torch.device) -> Tensor:
        if values.device == device:
            return values
        return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)

    def end(self) -> None:
        """A pass was left in its middle. Accelerate's loaders must be told; here nothing is kept of it."""
