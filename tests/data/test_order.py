"""Which samples when, for any split of any batch: each sample exactly once an epoch."""

import re
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given
from hypothesis import strategies as st

from accel_train.config.checks import divisors
from accel_train.config.options import parse
from accel_train.data.order import (
    EvaluationSampler,
    IndexBatch,
    Plan,
    TrainingSampler,
    accumulation_steps,
    divide_batch,
    micro_batch_sizes,
    virtual_batch_size,
)
from accel_train.errors import UserError
from accel_train.keyed import key, permuted


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    processes, accumulation, each = draw(st.integers(1, 8)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    unit = draw(st.integers(1, 4))
    # Some processes may have a unit less.
    units = processes * accumulation * each - draw(st.integers(0, processes - 1 if accumulation * each > 1 else 0))
    batch_size = units * unit
    samples = draw(st.integers(batch_size, batch_size * 12))
    return Plan(samples, batch_size, processes, accumulation, draw(st.booleans()), unit)


def drawn(order: TrainingSampler | EvaluationSampler) -> IndexBatch:
    """All that an order yields, in one, without empty slots."""
    draws = list(order)
    assert len(draws) == len(order)
    assert all(len(draw) == order.batch_size for draw in draws)  # shapes never change
    epochs = {draw.epoch for draw in draws}
    assert len(epochs) == 1
    ids, weights = (torch.cat([getattr(draw, part) for draw in draws]) for part in ("ids", "weights"))
    filled = torch.ones(len(ids), dtype=torch.bool)
    if isinstance(order, TrainingSampler):
        filled = (order.plan.places() >= 0).repeat(len(ids) // order.plan.slots)
    assert not weights[~filled].any()
    return IndexBatch(epochs.pop(), ids[filled], weights[filled])


@given(plans(), st.integers(0, 2**40), st.integers(0, 100))
def test_each_sample_exactly_once_and_padding_last(plan: Plan, seed: int, epoch: int) -> None:
    order = TrainingSampler(plan, seed)
    order.seek(epoch)
    found = drawn(order)
    assert found.epoch == epoch
    real = min(plan.samples, plan.updates_per_epoch * plan.batch_size)
    assert real == (plan.samples // plan.batch_size * plan.batch_size if plan.drop_last else plan.samples)
    assert len(found) == plan.updates_per_epoch * plan.batch_size
    assert found.weights.dtype == torch.float32
    assert found.weights.tolist() == [1.0] * real + [0.0] * (len(found) - real)
    once = found.ids[:real].sort().values
    assert len(once.unique()) == real and once.min() >= 0 and once.max() < plan.samples
    if not plan.drop_last:
        assert torch.equal(once, torch.arange(plan.samples))
    counted = found.weights.view(plan.updates_per_epoch, plan.batch_size).sum(1)
    assert counted.tolist() == [plan.real_samples(update * plan.batch_size) for update in range(plan.updates_per_epoch)]


@pytest.mark.slow
@given(plans(), st.integers(0, 2**40), st.integers(0, 100))
def test_the_windows_do_not_depend_on_the_split(plan: Plan, seed: int, epoch: int) -> None:
    whole = TrainingSampler(Plan(plan.samples, plan.batch_size, 1, 1, plan.drop_last), seed)
    split = TrainingSampler(plan, seed)
    whole.seek(epoch)
    split.seek(epoch)
    # What Accelerate's own sharding hands to each process, put together again: step by step, process by process.
    shards = [
        list(BatchSamplerShard(split, plan.processes, process, split_batches=True)) for process in range(plan.processes)
    ]
    steps = list(zip(*shards, strict=True))
    assert len(steps) == plan.updates_per_epoch * plan.accumulation
    filled = (plan.places() >= 0).repeat(plan.updates_per_epoch)
    for part in ("ids", "weights"):
        together = torch.cat([getattr(draw, part) for step in steps for draw in step])
        assert torch.equal(together[filled], getattr(drawn(whole), part))
    assert all(len(draw) == plan.micro_batch and draw.epoch == epoch for step in steps for draw in step)


@given(plans())
def test_units_are_dealt_as_evenly_as_possible(plan: Plan) -> None:
    places = plan.places().view(plan.accumulation, plan.processes, -1, plan.virtual_batch)
    assert torch.equal(places[places >= 0], torch.arange(plan.batch_size))
    units, empty = places[..., 0] >= 0, (places < 0).all(-1)
    assert torch.equal(units, ~empty)  # a unit is never parted
    counts = units.sum((0, 2)).tolist()
    assert counts == [plan.units_of(process) for process in range(plan.processes)]
    assert max(counts) - min(counts) <= 1 and min(counts) >= 1
    assert plan.empty == pytest.approx(empty.float().mean().item())
    for process in range(plan.processes):
        found = [not units[number, process].any() for number in range(plan.accumulation)]
        assert found == [plan.is_empty(process, number) for number in range(plan.accumulation)]
    if plan.batch_size % (plan.processes * plan.virtual_batch) == 0:
        assert not empty.any()


def test_what_is_said_of_a_division() -> None:
    assert Plan(256, 256, 4, 2).division == "256 = 4 processes x 2 accumulation x 32 images"
    three = Plan(256, 256, 3, 1, virtual_batch=32)
    shares = "256 of 288 slots = 3 processes x 1 accumulation x 96 images in virtual batches of 32"
    assert three.division == f"{shares} (11% of the slots are empty)"
    assert three.warnings() == ()
    one = Plan(256, 256, 3, 1)
    assert one.division == "256 of 258 slots = 3 processes x 1 accumulation x 86 images (1% of the slots are empty)"
    [warning] = Plan(32, 32, 3, 2, virtual_batch=8).warnings()
    assert "(33% of the slots" in warning and "with 2 or 4 processes, or with --batch-size 24 or 48" in warning


@pytest.mark.ci
@given(plans(), st.integers(0, 2**40), st.integers(0, 100), st.data())
def test_seek_goes_to_any_update(plan: Plan, seed: int, epoch: int, data: st.DataObject) -> None:
    order = TrainingSampler(plan, seed)
    order.seek(epoch)
    whole = drawn(order)
    update = data.draw(st.integers(0, plan.updates_per_epoch))
    list(order)[: data.draw(st.integers(0, 3))]  # whatever was read before
    order.seek(epoch, update * plan.batch_size)
    tail = whole[slice(update * plan.batch_size, None)]
    if update == plan.updates_per_epoch:
        assert len(order) == 0 and not list(order)
        return
    found = drawn(order)
    assert torch.equal(found.ids, tail.ids) and torch.equal(found.weights, tail.weights)
    assert torch.equal(drawn(order).ids, tail.ids)  # and stays there until the next seek
    for at in range(
        0, len(tail), 1 + len(tail) // 4
    ):  # sample by sample, without the class: a pure function of seed, epoch and position
        position = torch.tensor([(update * plan.batch_size + at) % plan.samples])
        assert permuted(position, plan.samples, key(seed, epoch, "order")).item() == tail.ids[at]


@pytest.mark.ci
@given(plans(), st.integers(1, 60), st.integers(0, 2**40), st.data())
def test_an_epoch_goes_on_with_another_batch_size_where_it_was(
    plan: Plan, batch_size: int, seed: int, data: st.DataObject
) -> None:
    whole = TrainingSampler(Plan(plan.samples, 1, 1, 1), seed)
    whole.seek(3)
    position = min(data.draw(st.integers(0, plan.updates_per_epoch)) * plan.batch_size, plan.samples)
    other = Plan(plan.samples, min(batch_size, plan.samples), 1, 1, plan.drop_last)
    order = TrainingSampler(other, seed)
    order.seek(3, position)
    left = other.updates_from(position)
    assert len(order) == left == len(list(order))
    assert other.updates_until(3, position) + left == 4 * other.updates_per_epoch
    if left == 0:
        assert plan.samples - position < (other.batch_size if plan.drop_last else 1)
        return
    found = drawn(order)
    real = sum(other.real_samples(position + update * other.batch_size) for update in range(left))
    assert found.weights.tolist() == [1.0] * real + [0.0] * (len(found) - real)
    assert torch.equal(found.ids[:real], drawn(whole).ids[position : position + real])
    assert position + real == plan.samples or (plan.drop_last and plan.samples - position - real < other.batch_size)


def test_epochs_and_seeds_are_independent() -> None:
    plan = Plan(1000, 100, 1, 1)
    orders = {}
    for seed, epoch in ((7, 1), (8, 0), (7, 0), (8, 1), (0, 0), (0, 1)):
        order = TrainingSampler(plan, seed)
        order.seek(epoch)
        orders[seed, epoch] = drawn(order).ids
    for at, first in orders.items():
        for other, second in orders.items():
            if at != other:
                assert int((first == second).sum()) < 12, (at, other)  # chance alone: 1 on average


def test_long_epochs_are_permuted_piece_by_piece() -> None:
    plan = Plan(100_003, 96, 2, 3)
    order = TrainingSampler(plan, 5)
    order.seek(3)
    found = drawn(order)
    assert torch.equal(
        found.ids[: plan.samples], permuted(torch.arange(plan.samples), plan.samples, key(5, 3, "order"))
    )
    order.seek(3, 700 * 96)
    assert torch.equal(drawn(order).ids, found.ids[700 * 96 :])


def test_a_billion_samples_begin_anywhere() -> None:
    plan = Plan(10**9, 1000, 4, 1)
    order = TrainingSampler(plan, 0)
    order.seek(2, 999_999_000)
    last = drawn(order)
    assert len(last) == 1000 and last.weights.min() == 1
    order.seek(2, 500_000_000)
    assert not set(next(iter(order)).ids.tolist()) & set(last.ids.tolist())


def test_a_batch_of_more_than_the_data_is_an_error() -> None:
    with pytest.raises(UserError, match=r"--batch-size: found 101, .* only 100"):
        Plan(100, 101, 1, 1)
    assert Plan(100, 100, 1, 1).updates_per_epoch == 1


class TestAccumulationSteps:
    @given(
        st.integers(1, 400), st.integers(1, 16), st.none() | st.integers(1, 64), st.sampled_from((1, 2, 3, 8, 16, 32))
    )
    def test_the_fewest_that_fit_or_what_is_possible(
        self, batch_size: int, processes: int, limit: int | None, unit: int
    ) -> None:
        units, rest = divmod(batch_size, unit)
        try:
            steps = accumulation_steps(batch_size, processes, limit, unit=unit)
        except UserError as error:
            if rest:
                named = [int(size) for size in re.findall(r"\d+", str(error).partition("; try ")[2])]
                assert named == [size for size in (units * unit, (units + 1) * unit) if size]
            elif units < processes:
                assert f"at most {units} process" in str(error)
                accumulation_steps(batch_size, units, None, unit=unit)
                accumulation_steps(unit * processes, processes, None, unit=unit)
            else:
                assert limit is not None and limit < unit
                assert str(error).startswith(f"--micro-batch-size: found {limit},")
                assert str(error).endswith(f"choose {unit} or more.")
            return
        assert not rest and units >= processes
        each = -(-units // processes)  # units of a process
        assert each % steps == 0  # no more empty slots than the division needs
        assert limit is None or each // steps * unit <= limit
        for fewer in range(1, steps):
            assert each % fewer or (limit is not None and each // fewer * unit > limit)


class TestVirtualBatchSize:
    @given(st.integers(1, 2000), st.booleans(), st.booleans())
    def test_it_divides_the_batch_and_is_the_nearest(self, batch_size: int, batchnorm: bool, pairs: bool) -> None:
        if pairs and batch_size % 2:
            return  # refused, because a pair would be parted
        size = virtual_batch_size(batch_size, batchnorm=batchnorm, pairs=pairs)
        assert batch_size % size == 0
        assert not pairs or size % 2 == 0

    @pytest.mark.parametrize(
        ("batch_size", "with_batchnorm", "without"),
        [(48, 16, 6), (64, 16, 8), (128, 16, 16), (256, 32, 32), (1024, 32, 32), (32, 16, 4), (97, 97, 97), (8, 8, 1)],
    )
    def test_sizes_that_people_use(self, batch_size: int, with_batchnorm: int, without: int) -> None:
        assert virtual_batch_size(batch_size, batchnorm=True, pairs=False) == with_batchnorm
        assert virtual_batch_size(batch_size, batchnorm=False, pairs=False) == without


@given(st.integers(1, 300), st.integers(1, 8), st.integers(1, 20))
def test_evaluation_takes_each_sample_once_in_its_order(samples: int, processes: int, each: int) -> None:
    order = EvaluationSampler(samples, processes * each)
    found = drawn(order)
    assert found.ids[:samples].tolist() == list(range(samples))
    assert found.weights.tolist() == [1.0] * samples + [0.0] * (len(found) - samples)
    assert len(found) - samples < processes * each
    shards = [list(BatchSamplerShard(order, processes, process, split_batches=True)) for process in range(processes)]
    assert {len(draw) for shard in shards for draw in shard} == {each}
    real = torch.cat([draw.ids[draw.weights > 0] for shard in shards for draw in shard])
    assert torch.equal(real.sort().values, torch.arange(samples))


def test_samples_that_are_left_out_become_padding_in_their_places() -> None:
    plan = Plan(103, 10, 1, 1)
    gone = torch.zeros(103, dtype=torch.bool)
    gone[[0, 5, 77, 102]] = True
    whole, rest = TrainingSampler(plan, 3), TrainingSampler(plan, 3, gone)
    for epoch in range(3):
        whole.seek(epoch)
        rest.seek(epoch)
        counts = []
        for before, after in zip(whole, rest, strict=True):
            stays = ~gone[before.ids]
            assert torch.equal(after.ids[stays], before.ids[stays])
            assert torch.equal(after.weights, before.weights * stays)
            assert not gone[after.ids].any()
            counts.append(int(after.weights.sum()))
        assert counts == [rest.size_at(update * plan.batch_size).samples for update in range(plan.updates_per_epoch)]
        assert sum(counts) == 99


def test_a_huge_batch_is_divided_at_once() -> None:
    began = time.monotonic()
    config = parse(["digits", "--batch-size", "1000000000", "--virtual-batch-size", "1000"])
    unit, accumulation = divide_batch(config, 1, batchnorm=True)
    assert virtual_batch_size(1_000_000_000, batchnorm=True, pairs=True) == 32
    assert micro_batch_sizes(1_000_000_000, 1)[:6] == [1, 2, 4, 5, 8, 10] and (unit, accumulation) == (1000, 1)
    assert time.monotonic() - began < 5  # a minute or more, if each number up to it is tried
    with pytest.raises(UserError, match="--batch-size: expected a number of at most 2,000,000,000, found"):
        parse(["digits", "--batch-size", str(10**18)])
    assert [divisors(n) for n in (1, 2, 12, 36)] == [[1], [1, 2], [1, 2, 3, 4, 6, 12], [1, 2, 3, 4, 6, 9, 12, 18, 36]]


def test_updates_have_their_sizes_and_their_micro_batches_which_are_not_kept() -> None:
    plan = Plan(100, 12, 1, 3, updates=13)  # it ends within the second epoch
    order = TrainingSampler(plan, 0)
    for epoch, sizes in ((0, [12] * 8 + [4]), (1, [12] * 4)):
        order.seek(epoch)
        fetched: list[weakref.ref[IndexBatch]] = []

        def batches(fetched: list[weakref.ref[IndexBatch]] = fetched) -> Iterator[IndexBatch]:
            for batch in order:
                assert [kept for kept in fetched if kept() is not None] == []
                fetched.append(weakref.ref(batch))
                yield batch
                del batch

        found = []
        for size, micro_batches in order.updates(batches()):
            weights = [next(micro_batches).weights.sum() for _ in range(3)]
            assert next(micro_batches, None) is None
            assert size.samples == size.covered == sum(weights)
            found.append(size)
            assert len(fetched) == 3 * len(found)  # none was fetched early
        assert [size.samples for size in found] == sizes
        assert [size.is_last for size in found] == [False] * (len(sizes) - 1) + [True]
