"""Optimizer, schedule, clipping and loss against values worked out by hand."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.optim import list_optimizers
from torch import Tensor, nn
from torch.nn import functional as F

from accel_train.config.schema import Loss, Model, Optim, Schedule
from accel_train.errors import UserError
from accel_train.models import create_model
from accel_train.models.classifier import find_classifier
from accel_train.optim.loss import balanced_class_weights, create_loss
from accel_train.optim.optimizer import create_optimizer
from accel_train.optim.schedule import LearningRate


def small_net() -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
    )
    find_classifier(model, 3)
    return model


# Optimizers

NOT_HERE = {"adahessian"} | {name for name in list_optimizers() if name.startswith(("bnb", "fused"))}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name.startswith("kron") else ())  # it compiles: a minute
        for name in sorted(set(list_optimizers()) - NOT_HERE)
    ],
)
def test_every_optimizer_of_timms_steps(name: str) -> None:
    torch.manual_seed(0)
    model = small_net()
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = create_optimizer(Optim(name=name, lr=1e-2, weight_decay=1e-2), model)
    LearningRate(Schedule(), optimizer, updates=3, updates_per_epoch=3)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 1, 8, 8)).square().sum().backward()
        optimizer.step()
    moved = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    assert all(moved)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    state = optimizer.state_dict()
    again = create_optimizer(Optim(name=name, lr=1e-2, weight_decay=1e-2), model)
    again.load_state_dict(state)
    assert [group["lr"] for group in again.param_groups] == [group["lr"] for group in optimizer.param_groups]


@pytest.mark.skipif(torch.cuda.is_available(), reason="bitsandbytes and Apex may be had with CUDA")
@pytest.mark.parametrize("name", sorted(NOT_HERE))
def test_an_optimizer_that_cannot_be_had_is_one_line(name: str) -> None:
    with pytest.raises(UserError, match=name):
        create_optimizer(Optim(name=name), small_net())


@pytest.mark.parametrize(
    ("optim", "needed"),
    [
        (Optim(name="adamx"), "adamw"),
        (Optim(name="sgd", betas=(0.9, 0.99)), "optim.betas"),
        (Optim(name="adan", betas=(0.9, 0.99)), "optim.betas"),
        (Optim(name="sgd", eps=1e-3), "optim.eps"),
        (Optim(name="sgd", momentum=0.0), "sgd"),
        (Optim(name="adamw", layer_decay=0.5), "optim.layer_decay"),
        (Optim(name="adamw", kwargs='{"lr": 0.1}'), "--optim.kwargs: remove 'lr'; set optim.lr"),
        (Optim(name="adamw", kwargs='{"filter_bias_and_bn": false}'), "adamw does not take .*filter_bias_and_bn"),
        (Optim(name="adamw", eps=1e-3, kwargs='{"eps": 0.1}'), "remove 'eps'; set optim.eps"),
        (Optim(name="adamw", kwargs='{"amsgard": true}'), "--optim.kwargs: adamw does not take .*amsgard"),
        (Optim(name="adan", kwargs='{"betas": [0.9, 0.99]}'), "adan"),
    ],
)
def test_settings_that_do_not_fit(optim: Optim, needed: str) -> None:
    with pytest.raises(UserError, match=needed):
        create_optimizer(optim, small_net())


def test_settings_reach_the_optimizer() -> None:
    adam = create_optimizer(Optim(name="adamw", lr=0.3, betas=(0.8, 0.7), eps=1e-3), small_net())
    assert {key: adam.defaults[key] for key in ("lr", "betas", "eps")} == {"lr": 0.3, "betas": (0.8, 0.7), "eps": 1e-3}
    assert adam.defaults["fused"] is True
    sgd = create_optimizer(Optim(name="sgd", momentum=0.7), small_net())
    assert (sgd.defaults["momentum"], sgd.defaults["nesterov"], sgd.defaults["fused"]) == (0.7, True, True)
    more = create_optimizer(Optim(name="adamw", kwargs='{"amsgrad": true, "eps": 0.01}'), small_net())
    assert (more.defaults["amsgrad"], more.defaults["eps"], more.defaults["fused"]) == (True, 0.01, True)
    adan = create_optimizer(Optim(name="adan", kwargs='{"betas": [0.9, 0.8, 0.7]}'), small_net())
    assert adan.defaults["betas"] == (0.9, 0.8, 0.7)
    plain = create_optimizer(Optim(name="momentum", momentum=0.0), small_net())
    assert (plain.defaults["momentum"], plain.defaults["nesterov"]) == (0.0, False)


def decayed(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(item) for group in optimizer.param_groups if group["weight_decay"] for item in group["params"]}


@pytest.mark.parametrize("name", ["sgd", "lamb"])  # of torch's and of timm's
def test_norms_and_biases_are_not_decayed(name: str) -> None:
    model = small_net()
    weights = {id(model[0].weight), id(model[4].weight)}
    assert decayed(create_optimizer(Optim(name=name, weight_decay=0.1), model)) == weights
    everything = {id(parameter) for parameter in model.parameters()}
    assert decayed(create_optimizer(Optim(name=name, weight_decay=0.1, decay_all=True), model)) == everything


@pytest.mark.parametrize("settings", [{"name": "adamw"}, {"name": "adamw", "layer_decay": 0.5}, {"name": "muon"}])
def test_decay_all_decays_what_the_model_excludes(settings: dict[str, Any]) -> None:
    """As torch.optim does: timm's transformers exclude their position embeddings and their class token."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    assert model.no_weight_decay() >= {"pos_embed", "cls_token"}
    everything = {id(parameter) for parameter in model.parameters()}
    plain = create_optimizer(Optim(weight_decay=0.1, **settings), model)
    assert not decayed(plain) & {id(model.pos_embed), id(model.cls_token)}
    optimizer = create_optimizer(Optim(weight_decay=0.1, decay_all=True, **settings), model)
    assert decayed(optimizer) == everything
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.1}


def test_layer_decay_is_in_the_rate_of_every_group() -> None:
    model = create_model(Model(name="vit_s16_plain"), num_classes=3, channels=3, image_size=32)
    optim = Optim(name="adamw", lr=0.1, weight_decay=0.05, layer_decay=0.5)
    schedule = Schedule(name="cosine", warmup_epochs=1, warmup_lr=0.02)
    optimizer = create_optimizer(optim, model)
    made = LearningRate(schedule, optimizer, updates=40, updates_per_epoch=10)
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def rates() -> dict[str, float]:
        return {names[id(item)]: group["lr"] for group in optimizer.param_groups for item in group["params"]}

    def depth(name: str) -> int:
        first, second, *_ = name.split(".")
        return {"patch_embed": 0, "norm": 12, "head": 13}[first] if first != "blocks" else int(second) + 1

    for update, base in ((0, 0.02), (5, 0.06), (10, 0.1), (25, 0.05)):
        made.step_update(update)
        found = rates()
        assert len(found) == sum(parameter.requires_grad for parameter in model.parameters())
        for name, rate in found.items():
            assert rate == pytest.approx(base * 0.5 ** (13 - depth(name))), name


@pytest.mark.parametrize("name", ["muon", "nadamuon"])
@pytest.mark.parametrize(
    ("model", "size", "first", "last"),
    [
        ("digits_cnn", 8, "0", "8"),
        ("test_vit", 160, "patch_embed.proj", "head"),
        ("test_resnet", 32, "conv1.0", "fc"),
        pytest.param("torchvision/resnet18", 32, "conv1", "fc", marks=pytest.mark.slow),
    ],
)
def test_muon_takes_the_hidden_weights_only(name: str, model: str, size: int, first: str, last: str) -> None:
    net = create_model(Model(name=model), num_classes=10, channels=3, image_size=size)
    optimizer = create_optimizer(Optim(name=name, weight_decay=0.1), net)
    net(torch.randn(2, 3, size, size)).square().sum().backward()
    optimizer.step()
    by_muon = {key for key, parameter in net.named_parameters() if "momentum_buffer" in optimizer.state[parameter]}
    matrices = {key for key, parameter in net.named_parameters() if parameter.ndim in (2, 4)}
    assert by_muon == matrices - {f"{first}.weight", f"{last}.weight"}


# Schedules

SCHEDULES = st.builds(
    Schedule,
    name=st.sampled_from(["constant", "cosine", "step", "multistep", "poly", "plateau"]),
    warmup_epochs=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    warmup_lr=st.sampled_from([0.0, 0.01]),
    min_lr=st.sampled_from([0.0, 1e-3]),
    step_epochs=st.sampled_from([0.5, 1.0, 2.5]),
    milestones=st.sampled_from([(1,), (2, 4)]),
    decay=st.sampled_from([0.1, 0.7]),
)


def one_weight(lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


def rates_of(schedule: Schedule, epochs: int, updates_per_epoch: int, order: list[int]) -> list[float]:
    optimizer = one_weight()
    made = LearningRate(schedule, optimizer, updates=epochs * updates_per_epoch, updates_per_epoch=updates_per_epoch)
    rates = []
    for update in order:
        made.step_update(update)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.ci
@settings(max_examples=200, deadline=None)
@given(schedule=SCHEDULES, epochs=st.integers(3, 6), updates=st.integers(1, 9), draw=st.randoms(use_true_random=False))
def test_the_rate_is_a_function_of_the_update(schedule: Schedule, epochs: int, updates: int, draw: object) -> None:
    in_order = list(range(epochs * updates))
    mixed = in_order * 2
    draw.shuffle(mixed)  # type: ignore[attr-defined]
    rates = rates_of(schedule, epochs, updates, in_order)
    assert [rates[update] for update in mixed] == rates_of(schedule, epochs, updates, mixed)
    assert all(0 <= rate <= 0.1 + 1e-12 for rate in rates)


@pytest.mark.parametrize("updates", [1, 2, 7])
def test_milestones_fall_on_the_first_update_of_an_epoch(updates: int) -> None:
    """As torch's, stepped once an epoch."""
    optimizer, expected = one_weight(), []
    torchs = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5], gamma=0.2)
    for _ in range(8):
        expected += [optimizer.param_groups[0]["lr"]] * updates
        optimizer.step()
        torchs.step()
    multistep = Schedule(name="multistep", milestones=(3, 5), decay=0.2)
    assert rates_of(multistep, 8, updates, list(range(8 * updates))) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["cosine", "poly"])
def test_a_run_of_one_update_or_of_warm_up_alone(name: str, caplog: pytest.LogCaptureFixture) -> None:
    schedule = Schedule(name=name)  # type: ignore[arg-type]
    assert rates_of(schedule, 1, 1, [0]) == [0.1]
    warm = Schedule(name=name, warmup_epochs=2)  # type: ignore[arg-type]
    assert rates_of(warm, 2, 2, [0, 1, 2, 3]) == pytest.approx([0, 0.025, 0.05, 0.075])
    assert not caplog.records


def test_the_first_update_after_an_evaluation_has_the_rate_that_follows_from_it() -> None:
    """`update` sets the next update's rate before the epoch's end is evaluated."""
    optimizer = one_weight()
    made = LearningRate(Schedule(name="plateau", patience_epochs=0), optimizer, updates=30, updates_per_epoch=3)
    for epoch, rate in enumerate([0.1, 0.1, 0.01, 0.001]):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        made.step_update(3 * epoch + 3)
        made.step(epoch + 1, 0.5)


def decays_after(made: LearningRate, evaluated: list[int]) -> list[int]:
    """The evaluations, of those after `evaluated` epochs that find no better accuracy, after which the rate falls."""
    found = []
    for epoch in evaluated:
        before = made.state_dict()["decays"]
        made.step(epoch, 0.5)
        found += [epoch] * (made.state_dict()["decays"] - before)
        again = LearningRate(PATIENT, one_weight(), updates=297, updates_per_epoch=3)
        again.load_state_dict(made.state_dict())
        made = again
    return found


PATIENT = Schedule(name="plateau", patience_epochs=10)


def test_the_patience_of_plateau_counts_epochs_however_often_it_is_evaluated() -> None:
    made = partial(LearningRate, PATIENT, one_weight(), updates=297, updates_per_epoch=3)
    assert decays_after(made(), list(range(1, 31))) == [12, 23]
    assert decays_after(made(), list(range(2, 31, 2))) == [14, 26]  # 2 was the best: 12 epochs since, and 12 again
    assert decays_after(made(), list(range(11, 50, 11))) == [22, 33, 44]


# Loss

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 0.0]])


def log_softmax_by_hand(row: list[float]) -> list[float]:
    total = math.log(sum(math.exp(value) for value in row))
    return [value - total for value in row]


def test_label_smoothing_by_hand() -> None:
    losses = create_loss(Loss(label_smoothing=0.3), None)(LOGITS, torch.tensor([0, 2]))
    first, second = (log_softmax_by_hand(row) for row in LOGITS.tolist())
    assert losses.tolist() == pytest.approx([-0.7 * first[0] - 0.1 * sum(first), -0.7 * second[2] - 0.1 * sum(second)])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 1.0, 3.0])])
def test_hard_targets_are_soft_targets_of_one_class(smoothing: float, weights: Tensor | None) -> None:
    loss = create_loss(Loss(label_smoothing=smoothing), weights)
    target = torch.tensor([1, 2])
    torch.testing.assert_close(loss(LOGITS, target), loss(LOGITS, F.one_hot(target, 3).double()))


def test_mixed_targets_by_hand() -> None:
    weights = torch.tensor([0.5, 1.0, 3.0])
    losses = create_loss(Loss(), weights)(LOGITS, torch.tensor([[0.75, 0.25, 0.0], [0.0, 0.5, 0.5]]))
    first, second = (log_softmax_by_hand(row) for row in LOGITS.tolist())
    expected = [-(0.75 * first[0] + 0.25 * first[1]) * 0.625, -(0.5 * second[1] + 0.5 * second[2]) * 2.0]
    assert losses.tolist() == pytest.approx(expected)


def test_the_loss_is_taken_in_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        losses = create_loss(Loss(), None)(LOGITS.to(dtype), torch.tensor([0, 2]))
        assert losses.dtype == torch.float32
        torch.testing.assert_close(losses, create_loss(Loss(), None)(LOGITS, torch.tensor([0, 2])))


@settings(max_examples=100, deadline=None)
@given(labels=st.lists(st.integers(0, 6), min_size=1, max_size=50))
def test_balanced_weights_have_mean_one_and_even_out_the_classes(labels: list[int]) -> None:
    labels_ = torch.tensor(labels)
    weights = balanced_class_weights(labels_, 8)
    assert weights.shape == (8,)
    assert weights.dtype == torch.float32
    assert weights[labels_].mean().item() == pytest.approx(1, rel=1e-5)
    shares = [weights[label].item() * labels.count(label) for label in set(labels)]
    assert shares == pytest.approx([len(labels) / len(set(labels))] * len(shares), rel=1e-5)
    assert all(weights[label] == 0 for label in range(8) if label not in labels)
