"""--data.sampler: which samples an epoch draws, and how often."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from accel_train.config.schema import Config, Data
from accel_train.data.memory import MemoryLoader
from accel_train.data.order import Draws, IndexBatch, Plan, TrainingSampler, create_draws
from accel_train.data.sources.arrays import ArraySource
from accel_train.errors import UserError
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.environment import Launch

BALANCED = Config(data=Data(sampler="balanced"))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=200), st.integers(0, 2**40), st.integers(0, 100))
def test_the_counts_of_samples_and_classes_differ_from_the_expected_by_less_than_one(
    labels: list[int], seed: int, epoch: int
) -> None:
    classes = torch.tensor(labels)
    drawn = Draws(seed, classes).of_epoch(epoch)
    assert drawn.shape == classes.shape
    sizes = classes.bincount(minlength=5)
    of_classes = len(labels) / (sizes > 0).sum()
    counts = torch.bincount(drawn, minlength=len(labels))
    assert bool(((counts - of_classes / sizes[classes]).abs() < 1 + 1e-9).all())
    assert bool(((torch.bincount(classes[drawn], minlength=5) - of_classes).abs()[sizes > 0] < 1 + 1e-9).all())


def test_balanced_draws_each_class_equally_often_and_each_epoch_other_samples_of_a_large_one() -> None:
    labels = torch.tensor([0] * 800 + [1] * 150 + [2] * 50)[torch.randperm(1000, generator=torch.manual_seed(0))]
    draws = create_draws(BALANCED, labels)
    assert draws is not None
    together = torch.zeros(1000)
    pairs = 0
    large = (labels == 0).nonzero()[:, 0]
    first = large[:40]
    for epoch in range(300):
        counts = torch.bincount(draws.of_epoch(epoch), minlength=1000)
        of_classes = torch.bincount(labels, counts, minlength=3)
        assert bool(((of_classes - 1000 / 3).abs() < 1).all())
        assert counts[large].max() <= 1 and 2 <= counts[labels == 1].min() <= counts[labels == 1].max() <= 3
        together += counts
        pairs += int(((counts[first][:, None] * counts[first]).sum() - counts[first].sum()).item())
    assert chisquare(together[large].numpy()).pvalue > 0.05  # under-dispersed, if anything
    # Two samples of a large class come together as often as in a random subset, not always or never.
    share = 1000 / 3 / 800
    assert pairs / 300 / (40 * 39) == pytest.approx(share * (1000 / 3 - 1) / 799, rel=0.03)


def everything(order: TrainingSampler) -> IndexBatch:
    found = list(order.blocks())
    assert all(block.positions is not None for block in found)
    positions = torch.cat([block.positions for block in found if block.positions is not None])
    return IndexBatch(
        found[0].epoch, torch.cat([each.ids for each in found]), torch.cat([each.weights for each in found]), positions
    )


def test_an_epoch_is_the_same_for_any_division_and_from_any_position() -> None:
    labels = (torch.arange(230) % 10 == 0).long()

    def order(processes: int, accumulation: int) -> TrainingSampler:
        draws = create_draws(BALANCED, labels)
        return TrainingSampler(Plan(230, 24, processes, accumulation), 3, draws=draws)

    whole = order(1, 1)
    whole.seek(2)
    expected = everything(whole)
    assert len(expected) == 240 and expected.weights.sum() == 230 == whole.plan.samples
    assert torch.bincount(labels[expected.ids[:230]]).tolist() == [115, 115]
    assert not torch.equal(expected.ids[:115].sort().values, expected.ids[115:230].sort().values)  # classes are mixed
    assert labels[expected.ids[:115]].float().mean() == pytest.approx(0.5, abs=0.15)
    for processes, accumulation in ((2, 3), (4, 1)):
        other = order(processes, accumulation)
        other.seek(2, 48)  # in the middle: as after a resume
        found = everything(other)
        assert torch.equal(found.ids, expected.ids[48:]) and torch.equal(found.keys(0), expected.keys(0)[48:])
    whole.seek(3)
    assert not torch.equal(everything(whole).ids, expected.ids)
    whole.seek(2)
    assert torch.equal(everything(whole).ids, expected.ids)


def test_a_sample_that_is_drawn_twice_is_augmented_in_two_ways() -> None:
    labels = torch.tensor([0] * 62 + [1] * 2)
    plan = Plan(64, 64, 1, 1)
    order = TrainingSampler(plan, 0, draws=create_draws(BALANCED, labels))
    source = ArraySource("set", torch.zeros(64, 1, 4, 4, dtype=torch.uint8), labels)
    loader = MemoryLoader(
        source, order, create_accelerator(Launch()), seed=0, pixels_device=torch.device("cpu"),
        memory_format=torch.contiguous_format,
    )  # fmt: skip
    (batch,) = loader
    assert torch.bincount(batch["ids"])[62:].tolist() == [16, 16]
    assert len(batch["keys"].unique()) == 64
    assert torch.equal(batch["keys"], torch.cat([each.keys(0) for each in order]))  # what a data worker uses


def test_an_unreadable_sample_becomes_padding_and_all_others_keep_their_places() -> None:
    labels, bad = torch.tensor([0] * 40 + [1] * 8), torch.zeros(48, dtype=torch.bool)
    bad[[3, 41, 42]] = True
    draws, plan = create_draws(BALANCED, labels), Plan(48, 16, 1, 1)
    whole, without = TrainingSampler(plan, 0, draws=draws), TrainingSampler(plan, 0, bad, draws=draws)
    before, after = everything(whole), everything(without)
    lost = bad[before.ids]
    assert lost.any() and torch.equal(before.ids[~lost], after.ids[~lost]) and not bad[after.ids].any()
    assert torch.equal(after.weights, (~lost).float())
    counts = [without.size_at(position).samples for position in (0, 16, 32)]
    assert counts == [int(part.sum()) for part in after.weights.split(16)]


def test_images_with_several_labels_are_not_drawn_by_class_and_shuffle_draws_nothing() -> None:
    labels = torch.tensor([[True, False], [True, True], [False, False]])
    with pytest.raises(UserError, match="one label for each image"):
        create_draws(BALANCED, labels)
    assert create_draws(Config(), labels) is None


def test_processes_with_other_labels_notice_it() -> None:
    labels = torch.tensor([0, 1, 1])
    assert Draws(0, labels).digest() == Draws(0, labels.clone()).digest() != Draws(0, 1 - labels).digest()
