"""The order in blocks of shards: each sample once, the same on any number of processes, and few shards at a time."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_train.config.schema import Config, Data
from accel_train.data.order.plan import Plan, canonical_nodes, epoch_length
from accel_train.data.order.samplers import Draws, IndexBatch, ShardOrder, ShardSampler, ShardTable
from accel_train.errors import UserError


def order_of(
    plan: Plan, sizes: list[int], open_shards: int, repeats: int = 1, draws: Draws | None = None
) -> ShardOrder:
    return ShardOrder(
        ShardTable.of(torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))),
        plan,
        seed=7,
        open_shards=open_shards,
        repeats=repeats,
        draws=draws,
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, list[int]]:
    """A plan, and the sizes of shards: some of one sample, some huge ones, fewer than canonical nodes or more."""
    processes, accumulation, each = draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    unit = draw(st.integers(1, 4))
    units = processes * accumulation * each - draw(st.integers(0, processes - 1 if accumulation * each > 1 else 0))
    batch_size = units * unit
    size = draw(st.sampled_from([st.just(1), st.integers(1, 9), st.integers(1, 400)]))
    sizes = draw(st.lists(size, min_size=1, max_size=30))
    if sum(sizes) < batch_size:
        sizes.append(batch_size)
    nodes = draw(st.sampled_from([n for n in range(1, batch_size + 1) if batch_size % n == 0]))
    plan = Plan(sum(sizes), batch_size, processes, accumulation, draw(st.booleans()), unit, canonical_nodes=nodes)
    return plan, sizes


def slots_of(sampler: ShardSampler) -> IndexBatch:
    """All that an epoch yields, in one, slot by slot."""
    batches = list(sampler)
    positions = [batch.positions for batch in batches if batch.positions is not None]
    ids, weights = torch.cat([batch.ids for batch in batches]), torch.cat([batch.weights for batch in batches])
    return IndexBatch(batches[0].epoch, ids, weights, torch.cat(positions) if positions else None)


def by_place(plan: Plan, batch: IndexBatch) -> IndexBatch:
    """The slots of whole epochs in the order of their places, without empty slots: the global order."""
    places = plan.places()
    order = places.argsort(stable=True)[(places < 0).sum() :]
    index = (torch.arange(len(batch) // plan.slots)[:, None] * plan.slots + order).flatten()
    positions = None if batch.positions is None else batch.positions[index]
    return IndexBatch(batch.epoch, batch.ids[index], batch.weights[index], positions)


@pytest.mark.ci
@given(plans(), st.integers(1, 5), st.integers(0, 50))
def test_each_sample_exactly_once_in_an_order_of_the_recipe_alone(
    drawn: tuple[Plan, list[int]], open_shards: int, epoch: int
) -> None:
    plan, sizes = drawn
    sampler = ShardSampler(plan, order_of(plan, sizes, open_shards))
    sampler.seek(epoch)
    found = by_place(plan, slots_of(sampler))
    real = plan.samples_per_epoch
    assert found.weights.tolist() == [1.0] * real + [0.0] * (len(found) - real)
    once = found.ids[:real].sort().values
    assert len(once.unique()) == real
    if not plan.drop_last:
        assert torch.equal(once, torch.arange(plan.samples))

    one = replace(plan, processes=1, accumulation=1)
    alone = ShardSampler(one, order_of(plan, sizes, open_shards))
    alone.seek(epoch)
    assert torch.equal(slots_of(alone).ids, found.ids)


@pytest.mark.ci
@given(plans(), st.integers(1, 5), st.data())
def test_seek_goes_to_any_update(drawn: tuple[Plan, list[int]], open_shards: int, data: st.DataObject) -> None:
    plan, sizes = drawn
    sampler = ShardSampler(plan, order_of(plan, sizes, open_shards))
    sampler.seek(3)
    whole = slots_of(sampler)
    update = data.draw(st.integers(0, plan.updates_per_epoch - 1))
    sampler.seek(3, update * plan.batch_size)
    tail = slots_of(sampler)
    assert torch.equal(tail.ids, whole.ids[update * plan.slots :])
    assert torch.equal(tail.weights, whole.weights[update * plan.slots :])


def shards_by_process(plan: Plan, sampler: ShardSampler, epoch: int) -> torch.Tensor:
    """The shard of each slot, also of those with weight 0: int64 [updates, processes, slots of one]."""
    sampler.seek(epoch)
    ids = slots_of(sampler).ids.view(-1, plan.accumulation, plan.processes, plan.micro_batch)
    shards = torch.searchsorted(sampler.order.table.prefix, ids, right=True) - 1
    return shards.transpose(1, 2).flatten(2)


@pytest.mark.ci
@given(plans(), st.integers(1, 5), st.integers(0, 50))
def test_a_process_has_few_shards_open_and_only_those_of_its_nodes(
    drawn: tuple[Plan, list[int]], open_shards: int, epoch: int
) -> None:
    plan, sizes = drawn
    order = order_of(plan, sizes, open_shards)
    shards = shards_by_process(plan, ShardSampler(plan, order), epoch)
    line = order.of_epoch(epoch)
    for process in range(plan.processes):
        places = plan.places_of(process)
        nodes = range(places.start // order.width, -(-places.stop // order.width))
        parts: set[int] = set()
        for start, end in zip(order.starts[nodes.start : nodes.stop], order.starts[nodes.start + 1 :], strict=False):
            held = (line.ends[:-1] < end) & (line.ends[1:] > start)
            parts |= set(line.shards[held].tolist())
        assert set(shards[:, process].flatten().tolist()) <= parts
    # A block is used in neighbouring updates, and all of an epoch's samples are in some block of at most K shards.
    blocks = torch.searchsorted(line.ends, line.blocks[:-1], right=True) - 1
    past = torch.searchsorted(line.ends, line.blocks[1:])
    assert (past - blocks).max() <= open_shards
    for update in shards:
        # of one node in one update: a block, and others only where these end within the update
        inside = (line.blocks[1:] - line.blocks[:-1]).min().clamp(min=1)
        most = open_shards * (2 + order.width // int(inside))
        for process, of_process in enumerate(update):
            places = plan.places_of(process)
            nodes_of_it = -(-places.stop // order.width) - places.start // order.width
            assert len(of_process.unique()) <= most * nodes_of_it + open_shards  # and padding has the block before


@pytest.mark.ci
@given(plans(), st.integers(1, 5), st.integers(2, 4), st.data())
def test_repeats_have_all_copies_of_a_sample_in_its_update_and_on_its_node(
    drawn: tuple[Plan, list[int]], open_shards: int, repeats: int, data: st.DataObject
) -> None:
    plan, sizes = drawn
    samples = plan.samples
    plan = replace(plan, samples=max(plan.batch_size, epoch_length(samples, repeats)))
    sampler = ShardSampler(plan, order_of(plan, sizes, open_shards, repeats))
    sampler.seek(2)
    found = by_place(plan, slots_of(sampler))
    ids = found.ids[found.weights > 0]
    assert found.positions is not None and len(ids) == plan.samples_per_epoch
    assert len(found.positions[found.weights > 0].unique()) == len(ids)
    assert ids.bincount().max() <= repeats and ids.max() < samples
    node = torch.arange(plan.batch_size) // sampler.order.width
    for update in range(plan.samples_per_epoch // plan.batch_size):
        of_update = found.ids[update * plan.batch_size :][: plan.batch_size]
        for part in range(int(node[-1]) + 1):
            counts = of_update[node == part].bincount()
            assert (counts == repeats).sum() * repeats >= (node == part).sum() - 2 * (repeats - 1)
    one = ShardSampler(replace(plan, processes=1, accumulation=1), sampler.order)
    one.seek(2)
    assert torch.equal(slots_of(one).ids, found.ids)


@pytest.mark.ci
@given(plans(), st.integers(1, 5), st.data())
def test_skipped_samples_are_replaced_by_those_of_their_shard_and_all_others_keep_their_places(
    drawn: tuple[Plan, list[int]], open_shards: int, data: st.DataObject
) -> None:
    plan, sizes = drawn
    bad = torch.tensor(data.draw(st.lists(st.booleans(), min_size=plan.samples, max_size=plan.samples)))
    bad[data.draw(st.integers(0, plan.samples - 1))] = False
    order = order_of(plan, sizes, open_shards)
    whole, rest = slots_of(ShardSampler(plan, order)), slots_of(ShardSampler(plan, order, bad))
    lost = bad[whole.ids]
    assert torch.equal(rest.weights, whole.weights * ~lost) and torch.equal(rest.ids[~lost], whole.ids[~lost])
    assert not bad[rest.ids].any()
    shard = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    can_be_read = torch.zeros(len(sizes), dtype=torch.bool).index_put((shard[~bad],), torch.tensor(True))
    moved = shard[rest.ids] != shard[whole.ids]
    assert not can_be_read[shard[whole.ids[moved]]].any()


@pytest.mark.ci
@given(plans(), st.integers(1, 5))
def test_drawn_samples_are_those_of_the_sampler(drawn: tuple[Plan, list[int]], open_shards: int) -> None:
    plan, sizes = drawn
    plan = replace(plan, drop_last=False)
    classes = (torch.arange(plan.samples) % 9).clamp(max=2)
    draws = Draws(7, classes)
    sampler = ShardSampler(plan, order_of(plan, sizes, open_shards, draws=draws))
    sampler.seek(4)
    found = by_place(plan, slots_of(sampler))
    assert torch.equal(found.ids[: plan.samples].sort().values, draws.of_epoch(4).sort().values)
    assert found.positions is not None  # two draws of a sample are augmented differently
    bad = torch.arange(plan.samples) % 4 == 1
    skipping = ShardSampler(plan, sampler.order, bad)
    skipping.seek(4)
    rest = by_place(plan, slots_of(skipping))
    assert torch.equal(rest.weights > 0, (found.weights > 0) & ~bad[found.ids])
    assert torch.equal(rest.ids[rest.weights > 0], found.ids[rest.weights > 0])


@pytest.mark.ci
def test_a_million_samples_take_less_than_a_second_and_no_table_of_them() -> None:
    plan = Plan(1 << 20, 1024, 8, 1, canonical_nodes=8)
    for sizes in ([1 << 10] * (1 << 10), [1 << 20], [1] * (1 << 20)):
        sampler = ShardSampler(plan, order_of(plan, sizes, 16))
        began = time.process_time()
        count = sum(len(block) for block in sampler.blocks())
        assert count == 1 << 20
        assert time.process_time() - began < 3  # measured: 0.3 s, shards of one sample 1.2 s
    huge = Plan(10**12, 1000, 4, 1, canonical_nodes=4)
    table = ShardTable(torch.arange(0, 10**12 + 1, 10**9))
    order = ShardOrder(table, huge, seed=0, open_shards=16)
    sampler = ShardSampler(huge, order)
    sampler.seek(0, 10**11)
    assert len(next(iter(sampler)).ids) == 1000


def test_neighbours_of_a_shard_are_apart_and_each_node_has_its_own_shards() -> None:
    plan = Plan(10_000, 80, 4, 1, canonical_nodes=4)
    sampler = ShardSampler(plan, order_of(plan, [100] * 100, 5))
    shards = shards_by_process(plan, sampler, 0)
    assert [len(shards[:, process].unique()) for process in range(4)] == [25] * 4
    assert all(len(update.unique()) >= 4 * 4 for update in shards)  # 20 places of a node have 4 or 5 of its 5 shards
    other = shards_by_process(plan, sampler, 1)
    assert other[:, 0].unique().tolist() != shards[:, 0].unique().tolist()


def test_canonical_nodes_follow_from_the_batch_size() -> None:
    def nodes(wanted: int | None, batch_size: int) -> int | None:
        return canonical_nodes(Config(data=Data(order="shards", canonical_nodes=wanted), batch_size=batch_size))

    assert [nodes(None, size) for size in (256, 100, 7)] == [8, 4, 1]
    assert nodes(25, 100) == 25
    with pytest.raises(UserError, match=r"canonical-nodes: found 30, .* the 100 samples .* such as 20 or 25"):
        nodes(30, 100)


def test_a_split_has_a_table_of_its_own() -> None:
    numbers = torch.tensor([4, 4, 4, 2, 2, 9])
    table = ShardTable.of(numbers)
    assert (table.prefix.tolist(), len(table)) == ([0, 3, 5, 6], 3)
    kept = ShardTable.of(numbers[torch.tensor([1, 2, 5])])
    assert (kept.prefix.tolist(), len(kept)) == ([0, 2, 3], 2)
    assert table.digest() != kept.digest() == ShardTable.of(torch.tensor([0, 0, 3])).digest()
