"""An order that needs few shards at a time (--data.order shards): a pure function of (seed, epoch, position).

The terms are those of MosaicML Streaming (docs.mosaicml.com/projects/streaming, "Shuffling"). In each epoch the shards
are permuted, and their samples, one shard after the other, form a line. Each of C canonical nodes has a contiguous
part of the line and a contiguous part of the places of every update. The parts of the line are as long as the node's
places need, so a cut may go through a shard, which two nodes read then. A node opens the shards of its part in blocks
of at most K, and the samples of a block are permuted.

    update      | node 0: w places | node 1: w places | …                  w = batch size / C
    line        | shard 7, shard 2, shard 9 | shard 9, shard 4, … | …      the part of node 0, of node 1, …
    blocks      | shards 7 and 2, | shard 9 | shards 9 and 4, | …          K = 2

C and K are in the recipe, so the order does not depend on the processes. A process computes contiguous places of an
update (plan.py), so it reads the shards of the nodes of these places only. If the last update of an epoch is not full,
the nodes of its last places have one place less in this epoch: their parts are shorter.

Only tables of shards, blocks and nodes are kept, and the order of any samples is computed from these.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from accel_train.data.order.drawing import Draws
from accel_train.data.order.plan import Plan
from accel_train.data.order.samplers import TrainingSampler
from accel_train.keyed import hashed, key, permuted, permuted_in_groups


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
        """`unreadable`: bool [samples], the samples to skip. All others keep their places, also if samples are drawn:
        another sample in their place would move the samples after it into other shards."""
        super().__init__(plan, order.seed, unreadable, repeats=order.repeats, samples=len(order))
        self.order, self.draws, self.window = order, order.draws, order.width
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
