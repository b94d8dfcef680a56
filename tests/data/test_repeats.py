"""Repeated augmentation (data.repeats): the samples of each update are those of torchvision's RASampler."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loaders import loader_of

from accel_train.config.schema import Augment, Config
from accel_train.data.order import Plan, TrainingSampler, divide_batch, epoch_length
from accel_train.data.sources.arrays import Synthetic
from accel_train.keyed import key, permuted


def ra_sampler(order: list[int], rank: int, world: int, repeats: int) -> list[int]:
    """The samples of a process, as torchvision's references/classification/sampler.py describes them.

    Each of the shuffled samples is repeated, one copy after the other; the list is filled up to a multiple of the
    processes; a process takes every world-th of it, and of these so many that all have 256 * (samples // 256).
    """
    repeated = [sample for sample in order for _ in range(repeats)]
    total = -(-len(order) * repeats // world) * world
    repeated += repeated[: total - len(repeated)]
    return repeated[rank:total:world][: len(order) // 256 * 256 // world]


def epoch_of(plan: Plan, samples: int, repeats: int, epoch: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Samples, weights and keys of an epoch's places, in the order of the global micro-batches."""
    sampler = TrainingSampler(plan, 7, repeats=repeats, samples=samples)
    sampler.seek(epoch)
    blocks = list(sampler)
    return tuple(torch.cat(parts) for parts in zip(*((b.ids, b.weights, b.keys(7)) for b in blocks), strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("samples", "repeats", "batch"), [(1000, 3, 48), (1000, 3, 64), (2048, 4, 128), (769, 2, 32)])
def test_an_update_has_the_samples_of_ra_sampler(world: int, samples: int, repeats: int, batch: int) -> None:
    order = permuted(torch.arange(samples), samples, key(7, 2, "order")).tolist()
    theirs = [ra_sampler(order, rank, world, repeats) for rank in range(world)]
    plan = Plan(epoch_length(samples, repeats), batch, 1, 1)
    ids, weights, keys = epoch_of(plan, samples, repeats)
    assert int(weights.sum()) == sum(map(len, theirs)) == samples // 256 * 256
    assert len(keys[weights > 0].unique()) == samples // 256 * 256  # each copy is augmented in another way
    share = batch // world
    for update in range(plan.updates_per_epoch):
        window = slice(update * batch, (update + 1) * batch)
        expected = [sample for rank in theirs for sample in rank[update * share : (update + 1) * share]]
        assert sorted(ids[window][weights[window] > 0].tolist()) == sorted(expected)


@pytest.mark.ci
@given(st.data())
def test_any_division_has_the_same_copies_and_can_go_on(data: st.DataObject) -> None:
    repeats, samples = data.draw(st.integers(2, 5)), data.draw(st.integers(40, 700))
    unit = data.draw(st.sampled_from([1, 2, 4]))
    batch = unit * data.draw(st.integers(1, 10))
    length = epoch_length(samples, repeats)
    whole = epoch_of(Plan(length, batch, 1, 1, virtual_batch=unit), samples, repeats)
    assert int(whole[1].sum()) == length
    processes = data.draw(st.integers(1, batch // unit))
    other = epoch_of(Plan(length, batch, processes, 1, virtual_batch=unit), samples, repeats)
    real, others = whole[1] > 0, other[1] > 0
    assert sorted(whole[2][real].tolist()) == sorted(other[2][others].tolist())
    # From the middle, with another batch size: what is left, and nothing else.
    done = data.draw(st.integers(0, length // batch)) * batch
    size = min(data.draw(st.integers(1, 60)), length)
    sampler = TrainingSampler(Plan(length, size, 1, 1), 7, repeats=repeats, samples=samples)
    sampler.seek(2, done)
    rest = [key for part in sampler for key in part.keys(7)[part.weights > 0].tolist()]
    before = whole[2][: done // batch * batch].tolist()
    assert sorted(before + rest) == sorted(whole[2][real].tolist())


@pytest.mark.parametrize("unit", [2, 16])
def test_copies_are_neither_mixed_with_each_other_nor_in_one_virtual_batch(unit: int) -> None:
    ids, weights, _ = epoch_of(Plan(1024, 64, 1, 1, virtual_batch=unit), 1100, 3)
    for start in range(0, len(ids), unit):
        part = ids[start : start + unit][weights[start : start + unit] > 0]
        assert len(part.unique()) == len(part)


def test_without_repeats_nothing_is_rounded_and_few_samples_are_all_used() -> None:
    assert (epoch_length(1000, 1), epoch_length(1000, 3), epoch_length(255, 3)) == (1000, 768, 255)
    ids, weights, _ = epoch_of(Plan(255, 30, 1, 1), 255, 3)
    assert len(ids[weights > 0].unique()) == 85
    assert divide_batch(Config(batch_size=30), 1, batchnorm=False) == (1, 1)


@pytest.mark.ci
def test_a_workers_batch_has_the_numbers_of_the_copies_on_the_host_too() -> None:
    """A worker moves the keys to shared memory: an array that shared theirs would have what is there afterwards."""
    source = Synthetic("train", 0, 96, 3, 8)
    sampler = TrainingSampler(Plan(96, 48, 1, 1), 7, repeats=3, samples=96)
    loader = loader_of(source, sampler, Augment(), seed=7, workers=1)
    for batch in loader:
        assert torch.equal(torch.from_numpy(batch["host_ids"]), batch["keys"])
