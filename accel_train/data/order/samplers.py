"""Batch samplers: which samples come when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import Sampler

from accel_train.data.order.keyed import key, permuted
from accel_train.data.order.plan import Plan


@dataclass(frozen=True)
class IndexBatch:
    """The samples of a micro-batch, or of a slice of it. A sampler hands it out and `loading` fetches it."""

    epoch: int
    ids: Tensor  # int64 [b]
    weights: Tensor  # float32 [b]: 1, or 0 for padding

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> IndexBatch:
        return IndexBatch(self.epoch, self.ids[part], self.weights[part])


class IndexSampler(Protocol):
    """A batch sampler: which samples come when."""

    batch_size: int
    """Samples of one draw, over all processes."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[IndexBatch]: ...

    def blocks(self) -> Iterator[IndexBatch]:
        """The same, many whole draws at once."""


class TrainingSampler(Sampler[IndexBatch]):
    """The batch sampler of training: yields the global micro-batches of one epoch, from a given sample on.

    Accelerate gives each process its slice of each. Position is set by `seek`, not by a loader's own epoch: that
    one is not handed on by Accelerate for every number of processes, nor does it know of the samples already done.
    """

    AT_ONCE = 1 << 15  # positions permuted in one call: enough to hide its overhead, little enough to be no list

    def __init__(self, plan: Plan, seed: int, unreadable: Tensor | None = None) -> None:
        """`unreadable`: bool [plan.samples], the samples that are left out; the others come where they would come."""
        self.plan = plan
        self.seed = seed
        self.unreadable = unreadable
        self.stand_in = 0 if unreadable is None else int((~unreadable).nonzero()[0])  # a sample that can be read
        self.batch_size = plan.batch_size // plan.accumulation  # read by Accelerate: of one global micro-batch
        self.drop_last = False  # read by Accelerate, too; no micro-batch of ours is short
        self.epoch = 0
        self.position = 0

    def seek(self, epoch: int, position: int = 0) -> None:
        """The next iteration begins after the first `position` samples of epoch `epoch`."""
        self.epoch, self.position = epoch, position

    def __len__(self) -> int:
        return self.plan.updates_from(self.position) * self.plan.accumulation

    def real_samples(self, position: int) -> int:
        """Samples in the window that begins at `position` of the epoch that are neither padding nor left out."""
        count = self.plan.real_samples(position)
        return count - self._left_out(position, count)

    @property
    def samples_per_epoch(self) -> int:
        """Samples of the epoch that are neither padding nor left out."""
        count = self.plan.samples_per_epoch
        return count - self._left_out(0, count)

    def _left_out(self, first: int, count: int) -> int:
        """How many of `count` positions of the epoch, from `first` on, have a sample that is left out."""
        if self.unreadable is None:
            return 0
        positions = torch.arange(first, first + count)
        ids = permuted(positions, self.plan.samples, key(self.seed, self.epoch, "order"))
        return int(self.unreadable[ids].sum())

    def blocks(self) -> Iterator[IndexBatch]:
        """Many whole global micro-batches at once, one after the other."""
        plan, epoch = self.plan, self.epoch
        word = key(self.seed, epoch, "order")
        first, last = self.position, self.position + plan.updates_from(self.position) * plan.batch_size
        step = max(1, self.AT_ONCE // self.batch_size) * self.batch_size
        for start in range(first, last, step):
            positions = torch.arange(start, min(start + step, last))
            weights = (positions < plan.samples).to(torch.float32)
            # Padding repeats samples from the start of the order, which are there in any case; it weighs nothing.
            ids = permuted(positions % plan.samples, plan.samples, word)
            if self.unreadable is not None:
                gone = self.unreadable[ids]
                weights[gone], ids[gone] = 0.0, self.stand_in
            yield IndexBatch(epoch, ids, weights)

    def __iter__(self) -> Iterator[IndexBatch]:
        for block in self.blocks():
            for at in range(0, len(block), self.batch_size):
                yield block[at : at + self.batch_size]


class EvaluationSampler(Sampler[IndexBatch]):
    """The batch sampler of evaluation: every sample once, in its stored order, padded to full batches."""

    def __init__(self, samples: int, batch_size: int) -> None:
        self.samples = samples
        self.batch_size = batch_size  # over all processes; read by Accelerate
        self.drop_last = False

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def blocks(self) -> Iterator[IndexBatch]:
        """All batches at once."""
        positions = torch.arange(len(self) * self.batch_size)
        yield IndexBatch(0, positions % self.samples, (positions < self.samples).to(torch.float32))

    def __iter__(self) -> Iterator[IndexBatch]:
        for block in self.blocks():
            for at in range(0, len(block), self.batch_size):
                yield block[at : at + self.batch_size]
