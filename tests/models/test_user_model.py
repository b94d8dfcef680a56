"""A model of a user's own function or a program's object, and --model.kwargs of any model."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_train import models
from accel_train.config.schema import Loss, Model
from accel_train.errors import UserError
from accel_train.models import create_model
from accel_train.optim.loss import create_loss
from accel_train.user_code import name_of, provided

CODE = """
import torch
from torch import nn

def linear(num_classes, in_chans, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(in_chans * image_size**2, num_classes))

def deep(num_classes, depth=1, width=4):
    layers = [nn.Flatten(), nn.LazyLinear(width)] + [nn.Linear(width, width) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))

def anything(**arguments):
    assert arguments == {"num_classes": 5, "more": [1, None]}
    return Net(5)

class Net(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes))

def no_module(num_classes):
    return 3

def two_outputs(num_classes):
    class Two(Net):
        def forward(self, x):
            return super().forward(x), x
    return Two(num_classes)

def wrong_count(num_classes):
    return Net(num_classes + 1)

def fails(num_classes):
    return int("seven")

def fails_later(num_classes):
    class Wrong(Net):
        def forward(self, x):
            return x @ x.new_zeros(3, 3)
    return Wrong(num_classes)

def needs_more(num_classes, depth):
    pass

value = 3
"""


def create(tmp_path: Path, name: str, **settings: Any) -> Any:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    model = Model(name=f"{path}:{name}", **settings)
    size = models.input_size(model, 8)
    assert models.pretrained_normalization(model) is None
    return models.create_model(model, num_classes=5, channels=3, image_size=size)


def test_it_is_called_with_what_its_signature_takes(tmp_path: Path) -> None:
    for name, parameters in (("linear", 3 * 8 * 8 * 5 + 5), ("Net", 20)):
        net = create(tmp_path, name)
        assert net.training
        assert sum(each.numel() for each in net.parameters()) == parameters
        assert net(torch.zeros(2, 3, 8, 8)).shape == (2, 5)
    assert len(create(tmp_path, "deep", kwargs='{"depth": 3}')) == 6
    create(tmp_path, "anything", kwargs='{"more": [1, null]}')
    assert create(tmp_path, "linear", image_size=4)[1].in_features == 48
    frozen = create(tmp_path, "deep", freeze_body=True)
    assert [name for name, each in frozen.named_parameters() if each.requires_grad] == ["3.weight", "3.bias"]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("no_module", {}, "returned a value of type int; expected a torch.nn.Module"),
        (
            "two_outputs",
            {},
            "computed a value of type tuple from an image [1, 3, 8, 8]; expected logits of the 5 classes",
        ),
        ("wrong_count", {}, "computed [1, 6] from an image [1, 3, 8, 8]; expected logits of the 5 classes, [1, 5]"),
        ("fails", {}, "ValueError: invalid literal for int() with base 10: 'seven' (mine.py, line "),
        ("fails_later", {}, "in forward: `return x @ x.new_zeros(3, 3)`)."),
        ("needs_more", {}, "needs the argument 'depth', but it is called with num_classes, in_chans, image_size"),
        ("deep", {"kwargs": '{"dpth": 3}'}, "mine.py:deep does not take 'dpth'. Did you mean 'depth'?"),
        ("deep", {"kwargs": '{"num_classes": 3}'}, "computed [1, 3] from an image"),
        ("deep", {"dropout": 0.1}, "model.dropout: is not passed to mine.py:deep; give its argument by model.kwargs"),
        ("deep", {"pretrained": True}, "has no published weights"),
        ("deep", {"gradient_checkpointing": True}, "mine.py:deep does not support it"),
        ("value", {}, "mine.py:value is an int; expected a function"),
        ("nothing", {}, "has no 'nothing'."),
    ],
)
def test_what_is_wrong_is_one_line(name: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        create(tmp_path, name, **settings)
    assert message in str(raised.value), str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_installed_module_and_a_file_with_the_name_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = models.create_model(
        Model(name="timm.models.resnet:resnet18", kwargs='{"output_stride": 16}'),
        num_classes=5, channels=3, image_size=32,
    )  # fmt: skip
    assert made(torch.zeros(2, 3, 32, 32)).shape == (2, 5)
    (tmp_path / "timm.py").write_text("import helper_of_mine\nfrom torch import nn\n" + CODE)
    (tmp_path / "helper_of_mine.py").write_text("")
    models.create_model(Model(name=f"{tmp_path}/timm.py:linear"), num_classes=5, channels=3, image_size=8)
    import timm

    assert timm.is_model("resnet18")  # the installed one


def test_kwargs_reach_timm_and_torchvision_and_may_not_repeat_other_settings() -> None:
    def made(name: str, kwargs: str) -> Any:
        return models.create_model(Model(name=name, kwargs=kwargs), num_classes=5, channels=3, image_size=32)

    assert made("resnet18", '{"channels": [8, 16, 32, 64]}').fc.in_features == 64
    assert not made("torchvision/resnet18", '{"zero_init_residual": true}').layer1[0].bn2.weight.any()
    for name in ("resnet18", "torchvision/resnet18", "mnist_cnn"):
        with pytest.raises(UserError, match=r"--model.kwargs: remove 'num_classes'; it follows from the data"):
            made(name, '{"num_classes": 3}')


@pytest.mark.parametrize(
    ("name", "kwargs", "told"),
    [
        ("resnet18", '{"norm_layer": "evonormb0"}', "'evonormb0' is unknown"),
        ("vit_tiny_patch16_224", '{"act_layer": "rellu"}', "'rellu' is unknown"),
        ("resnet18", '{"block": "basic"}', "'str' object has no attribute"),
    ],
)
def test_values_of_kwargs_that_do_not_exist(name: str, kwargs: str, told: str) -> None:
    with pytest.raises(UserError, match=rf"{name} does not take model.kwargs \({told}.*; leave it out"):
        models.create_model(Model(name=name, kwargs=kwargs), num_classes=5, channels=3, image_size=32)


@pytest.mark.parametrize("name", ["resnet18", "torchvision/resnet18", "mnist_cnn"])
def test_kwargs_that_do_not_exist(name: str) -> None:
    with pytest.raises(UserError, match=r"does not take model.kwargs .*wdth"):
        models.create_model(Model(name=name, kwargs='{"wdth": 3}'), num_classes=5, channels=3, image_size=28)


def given(value: Any) -> nn.Module:
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
    model = given(net)
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
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 3.0]), reduction="none")
    with provided({"loss.name": loss}):
        criterion = create_loss(Loss(name=name_of("loss.name", loss)), None)
    logits, targets = torch.rand(4, 2), torch.tensor([0, 1, 0, 1])
    expected = loss(logits, targets)
    loss.weight.fill_(7)  # type: ignore[union-attr, operator]
    assert torch.equal(criterion(logits, targets), expected)
