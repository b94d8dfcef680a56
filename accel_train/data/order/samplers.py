"""Batch samplers: they decide which samples each batch has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import Sampler

from accel_train.data.order.drawing import Draws
from accel_train.data.order.plan import Plan
from accel_train.keyed import hashed, key, permuted

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


class IndexSampler(Protocol):
    """A batch sampler that yields each global micro-batch as an IndexBatch."""

    batch_size: int
    """Samples of one batch, over all processes."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[IndexBatch]: ...

    def blocks(self) -> Iterator[IndexBatch]:
        """Yields the same samples in larger pieces, each of many whole batches."""


class TrainingSampler(Sampler[IndexBatch]):
    """Yields the global micro-batches of one epoch, from a given sample on.

    Accelerate gives each process its slice of each batch. `seek` sets the position. A loader's own epoch number is not
    used: Accelerate does not pass it on for every number of processes, and it says nothing of samples already done.
    """

    def __init__(self, plan: Plan, seed: int, unreadable: Tensor | None = None, draws: Draws | None = None) -> None:
        """`unreadable`: bool [plan.samples], the samples to skip. All others keep their places. `draws`: which samples
        an epoch has, without unreadable ones; None: each sample once."""
        self.plan = plan
        self.seed = seed
        self.draws = draws
        self.unreadable = unreadable = None if draws is not None else unreadable
        self.substitute = 0 if unreadable is None else int((~unreadable).nonzero()[0])  # a sample that can be read
        self.batch_size = plan.slots // plan.accumulation  # read by Accelerate: of one global micro-batch
        self.places = plan.places()
        self.drop_last = False  # also read by Accelerate; all our micro-batches are full
        self.epoch = 0
        self.position = 0

    def seek(self, epoch: int, position: int = 0) -> None:
        """Start the next iteration after the first `position` samples of epoch `epoch`."""
        self.epoch, self.position = epoch, position

    def __len__(self) -> int:
        return self.plan.updates_from(self.position) * self.plan.accumulation

    def real_samples(self, position: int) -> int:
        """Number of samples in the window at `position` of the epoch that are neither padding nor skipped."""
        count = self.plan.real_samples(position)
        return count - self._skipped(position, count)

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples of the epoch that are neither padding nor skipped."""
        count = self.plan.samples_per_epoch
        return count - self._skipped(0, count)

    def _skipped(self, first: int, count: int) -> int:
        """How many of the epoch's `count` positions from `first` on have an unreadable sample."""
        if self.unreadable is None:
            return 0
        return int(self.unreadable[self._ids(torch.arange(first, first + count))].sum())

    def _ids(self, positions: Tensor) -> Tensor:
        """The samples at `positions` (int64 [n]) of the epoch. This alone decides the order."""
        places = permuted(positions, self.plan.samples, key(self.seed, self.epoch, "order"))
        return places if self.draws is None else self.draws.of_epoch(self.epoch)[places]

    def blocks(self) -> Iterator[IndexBatch]:
        """Yields many whole global micro-batches at once, one after the other."""
        plan, epoch = self.plan, self.epoch
        last = plan.updates_from(self.position) * plan.slots
        step = block_size(self.batch_size)
        for start in range(0, last, step):
            slots = torch.arange(start, min(start + step, last))
            places = self.places[slots % plan.slots]
            positions = self.position + slots // plan.slots * plan.batch_size + places
            weights = ((places >= 0) & (positions < plan.samples)).to(torch.float32)
            # Padding repeats the first samples of the epoch, with weight 0; an empty slot has another one.
            ids = self._ids(positions % plan.samples)
            if self.unreadable is not None:
                skipped = self.unreadable[ids]
                weights[skipped], ids[skipped] = 0.0, self.substitute
            yield IndexBatch(epoch, ids, weights, None if self.draws is None else positions)

    def __iter__(self) -> Iterator[IndexBatch]:
        for block in self.blocks():
            for start in range(0, len(block), self.batch_size):
                yield block[start : start + self.batch_size]


class EvaluationSampler(Sampler[IndexBatch]):
    """Yields every sample once, in stored order, padded to full batches."""

    def __init__(self, samples: int, batch_size: int) -> None:
        self.samples = samples
        self.batch_size = batch_size  # over all processes; read by Accelerate
        self.drop_last = False

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def blocks(self) -> Iterator[IndexBatch]:
        """Yields many whole batches at once, one after the other."""
        last, step = len(self) * self.batch_size, block_size(self.batch_size)
        for start in range(0, last, step):
            positions = torch.arange(start, min(start + step, last))
            yield IndexBatch(0, positions % self.samples, (positions < self.samples).to(torch.float32))

    def __iter__(self) -> Iterator[IndexBatch]:
        for block in self.blocks():
            for start in range(0, len(block), self.batch_size):
                yield block[start : start + self.batch_size]
