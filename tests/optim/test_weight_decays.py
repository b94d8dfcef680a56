"""The weight decay of norms, and the parameter groups of what has settings of its own."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torchvision
from timm.optim import create_optimizer_v2
from torch import nn
from torchvision.ops._utils import split_normalization_params

from accel_train.config.schema import Model, Optim, Schedule
from accel_train.models import create_model
from accel_train.models.classifier import find_classifier
from accel_train.optim.optimizer import create_optimizer
from accel_train.optim.schedule import LearningRate


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer, setting: str) -> dict[str, Any]:
    """The setting of each parameter's group; each parameter must be in one group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [(names[id(p)], group.get(setting)) for group in optimizer.param_groups for p in group["params"]]
    assert len(found) == len(dict(found))
    return dict(found)


def groups_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


@pytest.mark.parametrize("name", ["resnet18", "convnext_tiny", "vit_b_16", "swin_t", "swin_v2_t", "maxvit_t"])
def test_each_decay_is_torchvisions(name: str) -> None:
    """The rule of set_weight_decay in its references: norms, which torchvision's own split finds."""
    with torch.device("meta"):  # no time for weights
        model = torchvision.models.get_model(name)
    norms = {*map(id, split_normalization_params(model)[0])}
    for norm in (None, 0.0, 0.02):
        theirs = {
            key: norm if norm is not None and id(parameter) in norms else 0.1
            for key, parameter in model.named_parameters()
        }
        optim = Optim(name="adamw", weight_decay=0.1, decay_all=True, norm_weight_decay=norm)
        assert by_name(model, create_optimizer(optim, model), "weight_decay") == theirs


@pytest.mark.parametrize("settings", [{"name": "adamw"}, {"name": "sgd", "layer_decay": 0.5}, {"name": "muon"}])
def test_the_rest_decays_as_without_them(settings: dict[str, Any]) -> None:
    model = create_model(Model(name="test_vit"), num_classes=3, channels=3, image_size=160)
    plain = create_optimizer(Optim(weight_decay=0.1, **settings), model)
    before = by_name(model, plain, "weight_decay")
    assert before["pos_embed"] == before["norm.weight"] == before["head.bias"] == 0
    optimizer = create_optimizer(Optim(weight_decay=0.1, norm_weight_decay=0.3, **settings), model)
    for name, decay in by_name(model, optimizer, "weight_decay").items():
        assert decay == (0.3 if "norm" in name else before[name]), name
    for setting in ("lr_scale", "use_fallback"):  # what layer decay and Muon need is as before
        assert by_name(model, optimizer, setting) == by_name(model, plain, setting)
    model(torch.randn(2, 3, 160, 160)).square().sum().backward()
    optimizer.step()


def test_norms_of_timms_own_kinds_are_norms() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1, norm_layer="rmsnorm")
    assert not isinstance(model.norm, nn.RMSNorm)
    decays = by_name(model, create_optimizer(Optim(norm_weight_decay=0.3), model), "weight_decay")
    assert {name for name, decay in decays.items() if decay} == {
        f"{n}.weight" for n in ("blocks.0.norm1", "blocks.0.norm2", "norm")
    }


def test_decays_and_rates_of_their_own_are_in_one_run() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2))
    find_classifier(model, 2)
    model[0].weight.requires_grad_(False)
    optim = Optim(lr=0.1, head_lr=0.5, weight_decay=0.1, norm_weight_decay=0.2)
    optimizer = create_optimizer(optim, model)
    LearningRate(Schedule(), optimizer, updates=10, updates_per_epoch=10)
    decays, rates = (by_name(model, optimizer, setting) for setting in ("weight_decay", "lr"))
    assert decays == {"0.bias": 0.0, "1.weight": 0.2, "1.bias": 0.2, "3.weight": 0.1, "3.bias": 0.0}
    assert rates == pytest.approx({"0.bias": 0.1, "1.weight": 0.1, "1.bias": 0.1, "3.weight": 0.5, "3.bias": 0.5})


def test_the_order_of_groups_is_that_of_checkpoints() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2))
    find_classifier(model, 2)
    plain = groups_of(model, create_optimizer(Optim(weight_decay=0.1), model))
    assert plain == groups_of(model, create_optimizer_v2(model, opt="sgd", lr=0.1, weight_decay=0.1))
    assert plain == [["0.bias", "1.weight", "1.bias", "3.bias"], ["0.weight", "3.weight"]]
    head = create_optimizer(Optim(lr=0.1, head_lr=0.5, weight_decay=0.1), model)
    assert groups_of(model, head) == [["0.bias", "1.weight", "1.bias"], ["3.bias"], ["0.weight"], ["3.weight"]]
