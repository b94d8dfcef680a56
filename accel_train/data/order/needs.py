"""Which shards some processes will need, and when (--data.order shards): for a cache that fetches them ahead."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from accel_train.data.order.plan import Plan
from accel_train.data.order.shards import ShardOrder

PIECE = 1 << 20  # places of a node that are looked up in one call, for memory


@dataclass(frozen=True)
class Need:
    """A shard, and the updates in which samples of it are used; in between it may or may not be used."""

    first: int
    """The first update, counted from the run's first one, 0."""
    last: int
    shard: int
    """Its number in the source (`ShardTable.numbers`)."""


def needed_shards(
    order: ShardOrder, plan: Plan, processes: range, epoch: int, position: int, epochs: int | None = None
) -> Iterator[Need]:
    """Yields the shards that `processes` need after the first `position` samples of `epoch`, in the order of their
    first updates, for so many `epochs` (None: until the run ends).

    `processes`: neighbours, such as those of one machine. A shard comes once for each block of shards that it is in:
    twice in an epoch if it is cut between two canonical nodes, and again in each epoch. The last update of a Need is
    therefore the moment until which to keep the shard; whoever wants the next one after it (Belady's rule) looks for
    the next Need of this shard. What is needed for padding is counted, too.
    """
    while not plan.is_end(epoch, 0) and (epochs is None or epochs > 0):
        places = plan.places_of(processes)
        nodes = range(places.start // order.width, -(-places.stop // order.width))
        ends = min(plan.updates_per_epoch, plan.updates - epoch * plan.updates_per_epoch) * plan.batch_size
        of_node = partial(_needs_of_node, order, plan, epoch, range(position, ends), places)
        yield from heapq.merge(*map(of_node, nodes), key=lambda need: need.first)
        epoch, position = epoch + 1, 0
        epochs = None if epochs is None else epochs - 1


def _needs_of_node(
    order: ShardOrder, plan: Plan, epoch: int, positions: range, places: range, node: int
) -> Iterator[Need]:
    """The needs of one canonical node in one epoch, those of one block after the other.

    `positions`: of the epoch; `places`: those of an update that matter.
    """
    begin, end = order.starts[node : node + 2].tolist()
    blocks = order.of_epoch(epoch).blocks
    low, high = torch.searchsorted(blocks, torch.tensor([begin, end])).tolist()
    for first, last in zip(blocks[low:high].tolist(), blocks[low + 1 : high + 1].tolist(), strict=True):
        found: dict[int, tuple[int, int]] = {}
        repeats = order.repeats
        for start in range((first - begin) * repeats, (last - begin) * repeats, PIECE):
            own = torch.arange(start, min(start + PIECE, (last - begin) * repeats))
            at = own // order.width * plan.batch_size + node * order.width + own % order.width
            at = at[at < min(positions.stop, plan.samples)]
            # In place of a sample after the last one, padding has that of the same place in the update before.
            padded = (at + plan.batch_size >= plan.samples) & (at + plan.batch_size < positions.stop)
            inside = (at >= positions.start) | (padded & (at + plan.batch_size >= positions.start))
            if repeats == 1:  # else the copies of a sample are anywhere in the node's places
                inside &= (at % plan.batch_size >= places.start) & (at % plan.batch_size < places.stop)
            at, padded = at[inside], padded[inside]
            if not len(at):
                continue
            update = at // plan.batch_size
            shards = order.look_up(epoch, at)[1]
            rows, inverse = torch.unique(shards, return_inverse=True)
            begun = torch.where(at >= positions.start, update, update + 1)
            firsts = torch.full_like(rows, plan.samples).scatter_reduce(0, inverse, begun, "amin")
            lasts = torch.zeros_like(rows).scatter_reduce(0, inverse, update + padded, "amax")
            for row, *span in zip(rows.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
                known = found.get(row, span)
                found[row] = min(known[0], span[0]), max(known[1], span[1])
        before, numbers = epoch * plan.updates_per_epoch, order.table.numbers
        needs = [Need(before + a, before + b, int(numbers[row])) for row, (a, b) in found.items()]
        yield from sorted(needs, key=lambda need: need.first)
