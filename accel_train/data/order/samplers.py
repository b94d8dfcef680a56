"""Batch samplers: they decide which samples each batch has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Sampler

from accel_train.data.order.plan import Plan
from accel_train.keyed import hashed, key, permuted

if TYPE_CHECKING:
    from accel_train.data.order.drawing import Draws

BLOCK = 1 << 15  # positions of one call: large enough to hide the overhead, small enough for memory


def block_size(batch_size: int) -> int:
    """The samples of a block: whole batches."""
    return max(1, BLOCK // batch_size) * batch_size


@dataclass(frozen=True)
class IndexBatch:
    """The sample numbers of a micro-batch, or of a slice of one. Samplers yield it; `workers.BatchDataset` loads it."""

    epoch: int
    ids: Tensor  # int64 [b]
    weights: Tensor  # float32 [b]: 1, or 0 for padding
    positions: Tensor | None = None
    """int64 [b], in the epoch, if it may have a sample more than once; None: it has each sample once."""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> IndexBatch:
        positions = None if self.positions is None else self.positions[part]
        return IndexBatch(self.epoch, self.ids[part], self.weights[part], positions)

    def keys(self, seed: int) -> Tensor:
        """The word from which each sample's augmentation follows, int64 [b]: another one for each time that an epoch
        has the sample."""
        return hashed(key(seed, self.epoch, "augment"), self.ids if self.positions is None else self.positions)

    def draw_ids(self, keys: Tensor) -> Tensor:
        """What distinguishes each draw from all others of its update, int64 [b]: a sample that is drawn twice has one
        number, but two keys. `keys`: what the method `keys` returned."""
        return self.ids if self.positions is None else keys


class IndexSampler(Sampler[IndexBatch], ABC):
    """A batch sampler that yields each global micro-batch as an IndexBatch."""

    batch_size: int
    """Samples of one batch, over all processes. Accelerate reads this and the next one."""
    drop_last = False  # all micro-batches are full
    virtual_batch = 2
    """Samples that are always computed together, one after the other: a batch has whole ones. 2: pairs."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def blocks(self) -> Iterator[IndexBatch]:
        """Yields the same samples in larger pieces, each of many whole batches, one after the other."""

    def __iter__(self) -> Iterator[IndexBatch]:
        for block in self.blocks():
            for start in range(0, len(block), self.batch_size):
                yield block[start : start + self.batch_size]


class TrainingSampler(IndexSampler):
    """Yields the global micro-batches of one epoch, from a given sample on.

    Accelerate gives each process its slice of each batch. `seek` sets the position. A loader's own epoch number is not
    used: Accelerate does not pass it on for every number of processes, and it says nothing of samples already done.
    """

    def __init__(
        self,
        plan: Plan,
        seed: int,
        unreadable: Tensor | None = None,
        draws: Draws | None = None,
        *,
        repeats: int = 1,
        samples: int | None = None,
    ) -> None:
        """`unreadable`: bool [samples], the samples to skip. All others keep their places. `draws`: which samples
        an epoch has, without unreadable ones; None: each sample once. `repeats`: how often each is in its update.
        `samples`: of the data; None: as many as an epoch has places (`epoch_length`)."""
        self.plan = plan
        self.seed = seed
        self.repeats, self.samples = repeats, plan.samples if samples is None else samples
        self.draws = draws
        self.unreadable = unreadable = None if draws is not None else unreadable
        self.substitute = 0 if unreadable is None else int((~unreadable).nonzero()[0])  # a sample that can be read
        self.window = plan.batch_size  # places in which the copies of a sample are kept apart
        self.batch_size = plan.slots // plan.accumulation
        self.virtual_batch = plan.virtual_batch
        self.places = plan.places()
        self.filled = self.places >= 0
        self.epoch = 0
        self.position = 0

    def seek(self, epoch: int, position: int = 0) -> None:
        """Start the next iteration after the first `position` samples of epoch `epoch`."""
        self.epoch, self.position = epoch, position

    def __len__(self) -> int:
        return self.plan.updates_left(self.epoch, self.position) * self.plan.accumulation

    def real_samples(self, position: int) -> int:
        """Number of samples in the window at `position` of the epoch that are neither padding nor skipped."""
        count = self.plan.real_samples(position)
        if self.unreadable is None:
            return count
        return count - int(self.unreadable[self._ids(torch.arange(position, position + count))].sum())

    def _ids(self, positions: Tensor) -> Tensor:
        """The samples at `positions` (int64 [n]) of the epoch. This alone decides the order."""
        if self.repeats > 1:
            positions = positions // self.repeats
        places = permuted(positions, self.samples, key(self.seed, self.epoch, "order"))
        return places if self.draws is None else self.draws.of_epoch(self.epoch)[places]

    def _apart(self, starts: Tensor, places: Tensor) -> Tensor:
        """The positions at `places` of the windows that begin at `starts`: a window has first one copy of each of its
        samples, then the second copies, … So copies are not neighbours, which might be mixed, nor, where batches are
        large enough, in one virtual batch. (On several processes, RASampler has each copy on another one.)"""
        lengths = (self.plan.samples - starts).clamp(min=0, max=self.window)  # the last window may be shorter
        whole, rest = lengths // self.repeats, lengths % self.repeats
        longer = rest * (whole + 1)  # the places of the first copies, of which there is one more
        first = places < longer
        copy = torch.where(first, places // (whole + 1), rest + (places - longer) // whole.clamp(min=1))
        number = torch.where(first, places % (whole + 1), (places - longer) % whole.clamp(min=1))
        return torch.where((places >= 0) & (places < lengths), starts + number * self.repeats + copy, starts + places)

    def blocks(self) -> Iterator[IndexBatch]:
        plan, epoch = self.plan, self.epoch
        last = plan.updates_left(epoch, self.position) * plan.slots
        step = block_size(self.batch_size)
        for start in range(0, last, step):
            slots = torch.arange(start, min(start + step, last))
            places = self.places[slots % plan.slots]
            starts = self.position + slots // plan.slots * plan.batch_size
            positions = starts + places
            weights = (self.filled[slots % plan.slots] & (positions < plan.samples)).to(torch.float32)
            if self.repeats > 1:
                first = places.clamp(min=0) // self.window * self.window
                positions = self._apart(starts + first, places - first)
            ids = self._ids(self._instead(positions))
            if self.unreadable is not None:
                skipped = self.unreadable[ids]
                weights[skipped], ids[skipped] = 0.0, self._substitutes(ids[skipped])
            repeated = self.draws is not None or self.repeats > 1
            yield IndexBatch(epoch, ids, weights, positions if repeated else None)

    def _instead(self, positions: Tensor) -> Tensor:
        """These `positions`, or others that have a sample: padding repeats the first samples of the epoch, with weight
        0; an empty slot has another one."""
        return positions % self.plan.samples

    def _substitutes(self, ids: Tensor) -> Tensor:
        """Samples that can be read, for those `ids` that cannot; they have weight 0."""
        return torch.full_like(ids, self.substitute)


class EvaluationSampler(IndexSampler):
    """Yields every sample once, in stored order, padded to full batches."""

    def __init__(self, samples: int, batch_size: int) -> None:
        self.samples, self.batch_size = samples, batch_size

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def blocks(self) -> Iterator[IndexBatch]:
        last, step = len(self) * self.batch_size, block_size(self.batch_size)
        for start in range(0, last, step):
            positions = torch.arange(start, min(start + step, last))
            yield IndexBatch(0, positions % self.samples, (positions < self.samples).to(torch.float32))
