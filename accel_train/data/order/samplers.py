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
from accel_train.keyed import hashed, key, permuted, permuted_in_groups, shift
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
    ) -> None:
        """`unreadable`: bool [samples], the samples to skip. All others keep their places, also if samples are drawn.
        `draws`: which samples an epoch has; None: each sample once. `repeats`: how often each is in its update.
        `samples`: of the data; None: as many as an epoch has places (`epoch_length`)."""
        self.plan = plan
        self.seed = seed
        self.repeats, self.samples = repeats, plan.samples if samples is None else samples
        self.draws = draws
        self.unreadable = unreadable
        self.substitute = 0 if unreadable is None else int((~unreadable).nonzero()[0])  # a sample that can be read
        self.span = plan.batch_size  # places in which the copies of a sample are kept apart
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
        places = permuted(positions, self.samples, key(self.seed, self.epoch, "order"))
        return places if self.draws is None else self.draws.of_epoch(self.epoch)[places]

    def _apart(self, starts: Tensor, places: Tensor) -> Tensor:
        """The positions at `places` of the spans that begin at `starts`: a span has first one copy of each of its
        samples, then the second copies, … So copies are not neighbours, which might be mixed, nor, where batches are
        large enough, in one virtual batch. (On several processes, RASampler has each copy on another one.)"""
        lengths = (self.plan.samples - starts).clamp(min=0, max=self.span)  # the last span may be shorter
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
                first = places.clamp(min=0) // self.span * self.span
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
# The terms are those of MosaicML Streaming (docs.mosaicml.com/projects/streaming, "Shuffling"). In each epoch the
# shards are permuted, and their samples, one shard after the other, form a line. Each of C canonical nodes has a
# contiguous part of the line and a contiguous part of the places of every update. The parts of the line are as long as
# the node's places need, so a cut may go through a shard, which two nodes read then. A node opens the shards of its
# part in blocks of at most K, and the samples of a block are permuted.
#
#     update      | node 0: w places | node 1: w places | …                  w = batch size / C
#     line        | shard 7, shard 2, shard 9 | shard 9, shard 4, … | …      the part of node 0, of node 1, …
#     blocks      | shards 7 and 2, | shard 9 | shards 9 and 4, | …          K = 2
#
# C and K are in the recipe, so the order does not depend on the processes. A process computes contiguous places of an
# update (plan.py), so it reads the shards of the nodes of these places only. If the last update of an epoch is not
# full, the nodes of its last places have one place less in this epoch: their parts are shorter.
#
# Only tables of shards, blocks and nodes are kept, and the order of any samples is computed from these.


@dataclass(frozen=True)
class ShardTable:
    """Which samples of a split are in which shard: each shard has some samples, one after the other."""

    prefix: Tensor
    """int64 [shards + 1]: shard i has the samples prefix[i] … prefix[i + 1] - 1."""

    @classmethod
    def of(cls, numbers: Tensor) -> ShardTable:
        """The table of samples that are in the shards `numbers`, int64 [n]. If samples of others are between those of a
        shard, each part counts as a shard."""
        first = torch.ones(len(numbers), dtype=torch.bool)
        first[1:] = numbers[1:] != numbers[:-1]
        starts = first.nonzero()[:, 0]
        return cls(torch.cat([starts, torch.tensor([len(numbers)])]))

    def __len__(self) -> int:
        """The number of shards."""
        return len(self.prefix) - 1

    def digest(self, table: str = "") -> str:
        """A SHA-256 that differs if the samples are divided into other shards, or if `table` is another text."""
        return hashlib.sha256(self.prefix.numpy().tobytes() + table.encode()).hexdigest()


@dataclass(frozen=True)
class Line:
    """The samples of an epoch as a line, shard by shard, and how it is divided."""

    shards: Tensor
    """int64 [s]: those with samples in this epoch, by their rows in the ShardTable, in their order on the line."""
    ends: Tensor
    """int64 [s + 1]: shard i of the line has the places ends[i] … ends[i + 1] - 1 on it."""
    firsts: Tensor
    """int64 [s]: the first sample of each shard, in stored order."""
    blocks: Tensor
    """int64 [b + 1]: where blocks begin on the line, and its end."""
    words: Tensor
    """int64 [b]: the key of each block's permutation."""
    drawn: Tensor | None
    """int64 [n]: the samples that are drawn, in stored order, if samples are drawn; these are counted above, then."""


class ShardOrder:
    """The order of the epochs of a run with --data.order shards."""

    def __init__(
        self,
        table: ShardTable,
        plan: Plan,
        *,
        seed: int,
        open_shards: int,
        repeats: int = 1,
        draws: Draws | None = None,
    ) -> None:
        """`plan`: one with canonical nodes; `repeats`: how often a sample is in its update; `draws`: which samples an
        epoch has, None: those of the table."""
        assert plan.canonical_nodes is not None
        self.table, self.seed, self.draws = table, seed, draws
        self.batch_size, self.repeats, self.open_shards = plan.batch_size, repeats, open_shards
        self.width = plan.batch_size // plan.canonical_nodes  # places of a node in an update
        updates, rest = divmod(plan.samples, plan.batch_size)
        in_last = (rest - torch.arange(plan.canonical_nodes) * self.width).clamp(0, self.width)
        samples = -(-(updates * self.width + in_last) // repeats)
        self.starts = torch.cat([torch.zeros(1, dtype=torch.int64), samples.cumsum(0)])
        """int64 [canonical_nodes + 1]: where the part of each node begins on the line, and the last one's end."""
        self._epoch, self._line = -1, Line(*(torch.empty(0, dtype=torch.int64),) * 5, None)

    def __len__(self) -> int:
        """The number of samples of the split."""
        return int(self.table.prefix[-1])

    def of_epoch(self, epoch: int) -> Line:
        if epoch != self._epoch:
            self._epoch, self._line = epoch, self._lay_out(epoch)
        return self._line

    def _lay_out(self, epoch: int) -> Line:
        prefix, drawn = self.table.prefix, None
        if self.draws is not None:
            drawn = self.draws.of_epoch(epoch).sort().values
            prefix = torch.searchsorted(drawn, prefix)
        shards = permuted(torch.arange(len(prefix) - 1), len(prefix) - 1, key(self.seed, epoch, "shards"))
        sizes = prefix[shards + 1] - prefix[shards]
        shards, sizes = shards[sizes > 0], sizes[sizes > 0]
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        lows = torch.searchsorted(ends, self.starts[:-1], right=True) - 1  # the first shard of each node …
        highs = torch.searchsorted(ends, self.starts[1:])  # … and the one after its last
        blocks = []
        for start, low, high in zip(self.starts.tolist(), lows.tolist(), highs.tolist(), strict=False):
            count = -(-(high - low) // self.open_shards)  # equal blocks: a last one of one shard would mix nothing
            blocks.append(ends[low + torch.arange(count) * (high - low) // count].clamp(min=start))
        blocks.append(self.starts[-1:])
        line = torch.cat(blocks)
        words = hashed(key(self.seed, epoch, "blocks"), torch.arange(len(line) - 1))
        return Line(shards, ends, prefix[shards], line, words, drawn)

    def look_up(self, epoch: int, positions: Tensor) -> Tensor:
        """The samples at `positions` (int64 [n]) of the epoch, int64 [n]."""
        line = self.of_epoch(epoch)
        updates, places = positions // self.batch_size, positions % self.batch_size
        nodes, places = places // self.width, updates * self.width + places % self.width  # of the node's part
        places = self.starts[nodes] + places // self.repeats
        blocks = torch.searchsorted(line.blocks, places, right=True) - 1
        starts, sizes = line.blocks[blocks], line.blocks.diff()
        places = starts + permuted_in_groups(places - starts, blocks, sizes, line.words)
        shards = torch.searchsorted(line.ends, places, right=True) - 1
        samples = line.firsts[shards] + places - line.ends[shards]
        return samples if line.drawn is None else line.drawn[samples]

    def substitutes(self, ids: Tensor, readable: Tensor) -> Tensor:
        """A sample that can be read in place of each of `ids` (int64 [n]), of the same shard if there is one.

        `readable`: all samples that can be read, in increasing order, int64 [m]; at least one.
        """
        after = torch.searchsorted(readable, ids).clamp(max=len(readable) - 1)
        before, after = readable[(after - 1).clamp(min=0)], readable[after]
        shards, of_after = (torch.searchsorted(self.table.prefix, each, right=True) for each in (ids, after))
        return torch.where(shards == of_after, after, before)


class ShardSampler(TrainingSampler):
    """A TrainingSampler in the order of a ShardOrder.

    What has weight 0 and is loaded all the same is a sample of the shards that the process has open: else each
    process would fetch the shards of the first samples once more for an epoch's last update.
    """

    def __init__(self, plan: Plan, order: ShardOrder, unreadable: Tensor | None = None) -> None:
        """`unreadable`: bool [samples], the samples to skip. All others keep their places."""
        super().__init__(plan, order.seed, unreadable, repeats=order.repeats, samples=len(order))
        self.order, self.draws, self.span = order, order.draws, order.width
        self.readable = torch.empty(0) if unreadable is None else (~unreadable).nonzero()[:, 0]
        owner = torch.arange(plan.slots) // plan.micro_batch % plan.processes
        first = torch.tensor([plan.places_of(each).start for each in range(plan.processes)])
        self.places = torch.where(self.filled, self.places, first[owner])

    def _ids(self, positions: Tensor) -> Tensor:
        return self.order.look_up(self.epoch, positions)

    def _instead(self, positions: Tensor) -> Tensor:
        """Padding has the sample of its place in the update before."""
        return torch.where(positions < self.plan.samples, positions, positions - self.plan.batch_size)

    def _substitutes(self, ids: Tensor) -> Tensor:
        return self.order.substitutes(ids, self.readable)
