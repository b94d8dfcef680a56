"""The complete state is saved and restored bit by bit, with each optimizer and each wrapper."""

import io
from typing import Any

import pytest
import torch
from timm.optim import create_optimizer_v2
from torch import nn

from accel_train.checkpoint.state import (
    HOW_TO_COMPUTE,
    broadcast_optimizer_state,
    broadcast_weights,
    gather_to_main,
    matching_state,
    named_tensors,
    optimizer_state,
    outline,
    parameter_names,
)

OPTIMIZERS = (
    "plain sgd",
    "sgd",
    "adamw",
    "adafactor",
    "lamb",
    "madgrad",
    "muon",
    "nadamw",
    "rmsprop",
    "lookahead_adam",
)


def tiny(seed: int, name: str, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 3))
    options = {"opt": name, "lr": 0.01, "weight_decay": 0.1, "momentum": 0.9}
    if name == "plain sgd":
        options |= {"opt": "momentum", "momentum": 0.0}
    return model, create_optimizer_v2(model, **{**options, **settings})


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(number)
    model(torch.randn(8, 1, 4, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def move(
    source: tuple[nn.Module, torch.optim.Optimizer], target: tuple[nn.Module, torch.optim.Optimizer], keep=()
) -> None:
    """Save and load the state without pickled code."""
    file = io.BytesIO()
    trees = named_tensors(source[0]), optimizer_state(*source)
    torch.save(gather_to_main(trees, here=True), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    broadcast_weights(named_tensors(target[0]), weights)
    state = matching_state(*target, state, keep)
    broadcast_optimizer_state(*target, outline(state), state)


@pytest.mark.parametrize("updates", [0, 4], ids=["before-the-first-update", "after-some"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_bitwise(name, updates):
    source, target = tiny(0, name), tiny(1, name)
    for number in range(updates):
        step(*source, number)
    step(*target, 99)  # a state that must vanish
    move(source, target)
    for number in range(4, 12):
        step(*source, number)
        step(*target, number)
    for name, tensor in source[0].state_dict().items():
        assert torch.equal(tensor, target[0].state_dict()[name]), name


def test_to_save_changes_nothing_and_is_a_copy():
    model, optimizer = tiny(0, "momentum")
    tree = gather_to_main((named_tensors(model), optimizer_state(model, optimizer)), here=True)
    assert tree[1]["state"] == {}  # torch.distributed.checkpoint would have made momentum of the weight decay
    step(model, optimizer, 0)
    tree = gather_to_main((named_tensors(model), optimizer_state(model, optimizer)), here=True)
    before = tree[0]["0.weight"].clone(), tree[1]["state"]["0.weight"]["momentum_buffer"].clone()
    step(model, optimizer, 1)
    assert torch.equal(tree[0]["0.weight"], before[0])
    assert torch.equal(tree[1]["state"]["0.weight"]["momentum_buffer"], before[1])


def test_settings_of_the_checkpoint_count_unless_kept_and_those_of_the_machine_never():
    source, target = tiny(0, "adamw", foreach=True), tiny(1, "adamw", foreach=False, weight_decay=0.5)
    source[1].param_groups[0]["lr"] = 0.125
    move(source, target, keep=["weight_decay"])
    group = target[1].param_groups[-1]
    assert target[1].param_groups[0]["lr"] == 0.125
    assert (group["weight_decay"], group["foreach"]) == (0.5, False)


def test_state_finds_its_parameters_by_name_if_they_are_grouped_in_another_way():
    source, target = tiny(0, "adamw"), tiny(1, "adamw", weight_decay=0.0)  # one group instead of two
    step(*source, 0)
    move(source, target)
    assert len(source[1].param_groups) == 2
    assert len(target[1].param_groups) == 1
    moved = optimizer_state(*target)["state"]
    for name, values in optimizer_state(*source)["state"].items():
        assert torch.equal(values["exp_avg"], moved[name]["exp_avg"]), name


def test_names_are_the_plain_ones_under_compile_and_memory_formats_survive():
    model, optimizer = tiny(0, "adamw")
    plain = set(model.state_dict())
    model[3] = torch.compile(model[3])  # type: ignore[index, operator]
    model = torch.compile(model)
    assert set(named_tensors(model)) == plain  # type: ignore[arg-type]
    assert "3.weight" in parameter_names(model, optimizer)  # type: ignore[arg-type]

    target = tiny(1, "adamw")
    target[0].to(memory_format=torch.channels_last)
    source = tiny(0, "adamw")
    step(*source, 0)
    move(source, target)
    weight = target[0][0].weight  # type: ignore[index]
    assert target[1].state[weight]["exp_avg"].stride() == weight.stride()
    assert torch.equal(weight, source[0][0].weight)  # type: ignore[index]


@pytest.mark.parametrize("name", [*OPTIMIZERS[:-1], "lion", "adafactorbv", "adan", "laprop", "novograd", "lamb"])
def test_an_optimizers_own_state_is_found_fitting_and_left_as_it_is(name):
    source, target = tiny(0, name), tiny(1, name)
    for number in range(3):
        step(*source, number)
    state = gather_to_main(optimizer_state(*source), here=True)
    found = matching_state(*target, state)
    assert found["state"].keys() == state["state"].keys()
    torch.testing.assert_close(found["state"], state["state"], rtol=0, atol=0)
    for old, new in zip(state["param_groups"], found["param_groups"], strict=True):
        assert {**old, **dict.fromkeys(HOW_TO_COMPUTE)} == {
            **new,
            **dict.fromkeys(HOW_TO_COMPUTE),
        }
    assert not target[1].state


@pytest.mark.parametrize(
    ("name", "then", "now"), [("momentum", 0.9, 0.0), ("momentum", 0.0, 0.9), ("rmsprop", 0.9, 0.0)]
)
def test_a_setting_may_be_changed_that_alters_what_a_state_has(name, then, now):
    source, target = tiny(0, name, momentum=then), tiny(1, name, momentum=now)
    for number in range(3):
        step(*source, number)
    state = gather_to_main(optimizer_state(*source), here=True)
    found = matching_state(*target, state, keep=["momentum"])
    assert [group["momentum"] for group in found["param_groups"]] == [now, now]
    broadcast_optimizer_state(*target, outline(found), found)
    step(*target, 3)
