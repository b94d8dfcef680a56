"""Models that a program gives as objects."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_train.config.schema import Loss, Model
from accel_train.errors import UserError
from accel_train.models import create_model
from accel_train.optim.loss import create_loss
from accel_train.user_code.objects import name_of, provided


def created(value: Any) -> nn.Module:
    with provided({"model.name": value}):
        return create_model(Model(name=name_of("model.name", value)), num_classes=2, channels=1, image_size=4)


class WithLogits(nn.Module):
    """Its output is like that of a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, 2)

    def forward(self, images: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=None, logits=self.last(images.flatten(1)))


def test_a_model_whose_output_has_logits_computes_these() -> None:
    net, images = WithLogits(), torch.rand(3, 1, 4, 4)
    model = created(net)
    assert list(model.state_dict()) == ["last.weight", "last.bias"]
    logits = net(images).logits  # still as it was
    for made in (model, copy.deepcopy(model)):  # as of the EMA, which must not compute with the other's weights
        assert torch.equal(made(images), logits)
    copied = copy.deepcopy(model)
    nn.init.zeros_(copied.last.weight)  # type: ignore[arg-type, union-attr]
    assert not torch.equal(copied(images), logits) and torch.equal(model(images), logits)


def test_a_model_without_source_is_refused_where_its_object_is_not_given() -> None:
    name = name_of("model.name", WithLogits())
    with pytest.raises(UserError, match=r"made with an object of a Python program \(WithLogits#"):
        create_model(Model(name=name), num_classes=2, channels=1, image_size=4)


def test_a_loss_object_is_copied() -> None:
    given = nn.CrossEntropyLoss(torch.tensor([1.0, 3.0]), reduction="none")
    with provided({"loss.name": given}):
        criterion = create_loss(Loss(name=name_of("loss.name", given)), None)
    logits, targets = torch.rand(4, 2), torch.tensor([0, 1, 0, 1])
    expected = given(logits, targets)
    given.weight.fill_(7)  # type: ignore[union-attr, operator]
    assert torch.equal(criterion(logits, targets), expected)
