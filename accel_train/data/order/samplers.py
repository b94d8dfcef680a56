"""Batch samplers, which decide which samples each batch has: shuffled, drawn by class, or few shards at a time."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Sampler

from accel_train.config.schema import Config
from accel_train.data.order.plan import Plan
from accel_train.keyed import hashed, key, permuted, shift
from accel_train.task import task_of

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
        shards: ShardOrder | None = None,
    ) -> None:
        """`unreadable`: bool [samples], the samples to skip. All others keep their places, also if samples are drawn.
        `draws`: which samples an epoch has; None: each sample once. `repeats`: how often each is in its update.
        `samples`: of the data; None: as many as an epoch has places (`epoch_length`). `shards`: the order, if it is
        not at random over all samples."""
        self.plan = plan
        self.seed = seed
        self.repeats, self.samples = repeats, plan.samples if samples is None else samples
        self.draws, self.shards = draws, shards
        self.unreadable = unreadable
        self.substitute = 0 if unreadable is None else int((~unreadable).nonzero()[0])  # a sample that can be read
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
        """Number of samples in the update at `position` of the epoch that are neither padding nor skipped."""
        count = self.plan.real_samples(position)
        if self.unreadable is None:
            return count
        return count - int(self.unreadable[self._ids(torch.arange(position, position + count))].sum())

    def _ids(self, positions: Tensor) -> Tensor:
        """The samples at `positions` (int64 [n]) of the epoch. This alone decides the order."""
        if self.repeats > 1:
            positions = positions // self.repeats
        if self.shards is not None:
            return self.shards.look_up(self.epoch, positions)
        places = permuted(positions, self.samples, key(self.seed, self.epoch, "order"))
        return places if self.draws is None else self.draws.of_epoch(self.epoch)[places]

    def _apart(self, starts: Tensor, places: Tensor) -> Tensor:
        """The positions at `places` of the updates that begin at `starts`: an update has first one copy of each of its
        samples, then the second copies, … So copies are not neighbours, which might be mixed, nor, where batches are
        large enough, in one virtual batch. (On several processes, RASampler has each copy on another one.)"""
        lengths = (self.plan.samples - starts).clamp(min=0, max=self.plan.batch_size)  # the last update may be shorter
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
                positions = self._apart(starts, places)
            # Padding repeats the first samples of the epoch, with weight 0; an empty slot has another sample.
            ids = self._ids(positions % plan.samples)
            if self.unreadable is not None:
                skipped = self.unreadable[ids]
                weights[skipped], ids[skipped] = 0.0, self.substitute
            repeated = self.draws is not None or self.repeats > 1
            yield IndexBatch(epoch, ids, weights, positions if repeated else None)


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


# Which samples an epoch draws with --data.sampler balanced.
#
# An epoch has as many draws as training samples. This is systematic sampling: each sample is an interval on a line, as
# long as one divided by the size of its class, and the draws are equally spaced points, the first one at random. So
# the number of draws of a sample is proportional to this length, rounded up or down. The intervals of a class are
# adjacent, so the same holds for classes; within a class the order is shuffled in each epoch.
#
# All of it is a pure function of (seed, epoch) and the labels.


DRAWN_BLOCK = 1 << 20  # samples permuted in one call, for memory


class Draws:
    """The samples that each epoch draws: each class equally often."""

    def __init__(self, seed: int, labels: Tensor) -> None:
        """`labels`: int64 [n], the class of each sample."""
        self.seed, self.labels = seed, labels
        weights = 1 / labels.bincount().double()[labels]
        self.weights = weights / weights.max()
        self._epoch, self._drawn = -1, labels

    def of_epoch(self, epoch: int) -> Tensor:
        """The sample of each draw, int64 [n], one class after the other."""
        if epoch != self._epoch:
            self._epoch, self._drawn = epoch, self._draw(epoch)
        return self._drawn

    def _draw(self, epoch: int) -> Tensor:
        count = len(self.labels)
        word = key(self.seed, epoch, "place")
        starts = range(0, count, DRAWN_BLOCK)
        line = torch.cat([permuted(torch.arange(i, min(i + DRAWN_BLOCK, count)), count, word) for i in starts])
        line = line[self.labels[line].argsort(stable=True)]
        ends = self.weights[line].cumsum(0)
        first = _uniform(torch.tensor(key(self.seed, epoch, "first draw")))
        points = (torch.arange(count) + first) * (ends[-1] / count)
        return line[torch.searchsorted(ends, points, right=True).clamp_(max=count - 1)]  # a sum of floats is rounded

    def digest(self) -> str:
        """The SHA-256 of the labels, by which processes compare their draws."""
        return hashlib.sha256(self.labels.numpy().tobytes()).hexdigest()


def _uniform(keys: Tensor) -> Tensor:
    """A number in [0, 1) for each key, float64 with 53 random bits."""
    return shift(keys, 11).to(torch.float64) * 2.0**-53


def create_draws(config: Config, labels: Tensor) -> Draws | None:
    """What an epoch draws; None: each sample once. `labels`: see `Source.labels`. Raises UserError if images may have
    several labels: then they have no class."""
    if config.data.sampler == "shuffle":
        return None
    task_of(labels).check_one_label("--data.sampler balanced", "use shuffle.")
    return Draws(config.seed, labels)


# An order that needs few shards at a time (--data.order shards): a pure function of (seed, epoch, position).
#
# In each epoch the shards are permuted, and taken in blocks of at most K (--data.open-shards); the samples of a block
# are permuted. So an update has samples of one block, or of two where one ends. K is in the recipe: the order does not
# depend on the processes. Only a table of the shards is kept, and the order of any samples is computed from it.


def shard_bounds(numbers: Tensor) -> Tensor:
    """int64 [shards + 1] for samples that are in the shards `numbers`, int64 [n]: shard i has the samples
    bounds[i] … bounds[i + 1] - 1. If samples of others are between those of a shard, each part counts as a shard."""
    first = torch.ones(len(numbers), dtype=torch.bool)
    first[1:] = numbers[1:] != numbers[:-1]
    return torch.cat([first.nonzero()[:, 0], torch.tensor([len(numbers)])])


class ShardOrder:
    """The order of the epochs of a run with --data.order shards."""

    def __init__(self, bounds: Tensor, *, seed: int, open_shards: int) -> None:
        """`bounds`: of `shard_bounds`; `open_shards`: of one block, at most."""
        self.bounds, self.seed = bounds, seed
        shards = len(bounds) - 1
        blocks = -(-shards // open_shards)  # equal ones: a last one of one shard would mix nothing
        self.blocks = torch.arange(blocks + 1) * shards // blocks
        """int64 [blocks + 1]: which of the permuted shards each block has."""

    def look_up(self, epoch: int, positions: Tensor) -> Tensor:
        """The samples at `positions` (int64 [n]) of the epoch, int64 [n]."""
        count = len(self.bounds) - 1
        shards = permuted(torch.arange(count), count, key(self.seed, epoch, "shards"))
        sizes = self.bounds.diff()[shards]
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])  # of the shards, one after the other
        places = positions.clone()
        blocks = torch.searchsorted(starts[self.blocks], positions, right=True) - 1
        for block in sorted({*blocks.tolist()}):
            start, end = starts[self.blocks[block : block + 2]].tolist()
            inside = blocks == block
            word = key(self.seed, epoch, "block", block)
            places[inside] = start + permuted(positions[inside] - start, end - start, word)
        found = torch.searchsorted(starts, places, right=True) - 1
        return self.bounds[shards[found]] + places - starts[found]
