"""Which layer is the classifier of a model, and what is refused where nobody knows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from accel_train.config.schema import Model, Optim
from accel_train.errors import UserError
from accel_train.models.classifier import classifier_names, find_classifier, freeze
from accel_train.models.weights import Weights, load_into
from accel_train.models.wrapping import input_names
from accel_train.optim.optimizer import create_optimizer

CLASSES = 5


class Net(nn.Module):
    """A model that knows nothing of classifiers."""

    def __init__(self, classes: int = CLASSES, after: nn.Module | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8))
        self.head = nn.Linear(8, classes)
        self.after = after or nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.after(self.head(self.body(images)))
        return logits


class HeadFirst(nn.Module):
    """The classifier is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(8, CLASSES), nn.Linear(48, 8)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images.flatten(1)))
        return logits


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, logits: Tensor) -> Tensor:
        return logits * self.scale


class Own(nn.Module):
    """Without a layer of torch's, and with nothing that computes logits alone."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, classes))
        self.scale = Temperature()

    def forward(self, images: Tensor) -> Tensor:
        return self.scale(images.flatten(1)) @ self.weight


class Telling(Own):
    def get_classifier(self) -> nn.Module:
        return self.scale


def found(model: nn.Module) -> tuple[str, ...]:
    find_classifier(model, CLASSES)
    return classifier_names(model)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Net(), ("head",)),
        (nn.Sequential(Net()), ("0.head",)),
        (Net(after=nn.BatchNorm1d(CLASSES)), ()),
        (Net(after=Temperature()), ()),
        (HeadFirst(), ()),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, CLASSES, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()), ("1",)),
        (Own(), ()),
        (Telling(), ("scale",)),
        (nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Linear(8, CLASSES), nn.LogSoftmax(1)), ("2",)),
    ],
    ids=["last", "wrapped", "batchnorm", "temperature", "first", "convolution", "own", "telling", "softmax"],
)
def test_the_classifier_is_the_last_layer_or_what_the_model_says(model: nn.Module, expected: tuple[str, ...]) -> None:
    assert found(model) == expected


def test_only_what_needs_an_unknown_classifier_is_refused(tmp_path: Path) -> None:
    model = Own()
    assert found(model) == () == input_names(model)
    create_optimizer(Optim(), model)
    needed = r"give the model a method get_classifier\(\)"
    with pytest.raises(UserError, match=rf"--model\.freeze-body: .*{needed}"):
        freeze(model, Model(freeze_body=True))
    with pytest.raises(UserError, match=rf"--optim\.head-lr: .*{needed}"):
        create_optimizer(Optim(head_lr=1.0), model)
    save_file(Own().state_dict(), tmp_path / "same.safetensors")
    save_file(Own(7).state_dict(), tmp_path / "other.safetensors")
    letters = tuple("abcde")
    assert "2 of 2 tensors" in load_into(model, Weights(tmp_path / "same.safetensors", "same", letters), letters, 3)
    for file, classes in (("other", None), ("same", tuple("edcba"))):
        weights = Weights(tmp_path / f"{file}.safetensors", file, classes)
        with pytest.raises(UserError, match=rf"--model\.weights: {file} is of other classes: .*{needed}"):
            load_into(model, weights, letters, 3)


def test_weights_of_other_classes_get_a_new_classifier(tmp_path: Path) -> None:
    theirs, model = Net(7), Net()
    found(model)
    save_file(theirs.state_dict(), tmp_path / "net.safetensors")
    assert "new last layer" in load_into(model, Weights(tmp_path / "net.safetensors", "net", None), tuple("abcde"), 3)
    assert torch.equal(model.state_dict()["body.3.weight"], theirs.state_dict()["body.3.weight"])
