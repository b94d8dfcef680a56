"""Names of data sources."""

from pathlib import Path

import pytest

from accel_train.config.schema import Data
from accel_train.data.sources.load import load_splits
from accel_train.errors import UserError


@pytest.mark.parametrize(
    ("name", "meant"),
    [("cifar", "cifar10"), ("fashionmnist", "fashion_mnist"), ("Digits", "digits"), ("foldr", "folder")],
)
def test_an_unknown_name_gets_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"Did you mean '{meant}'"):
        load_splits(Data(name=name), 0)


@pytest.mark.parametrize("name", ["", "hfds/", "tfds/x", "torch/imagenet21k", "zzz"])
def test_other_unknown_names(name: str) -> None:
    with pytest.raises(UserError, match="unknown dataset"):
        load_splits(Data(name=name), 0)


@pytest.mark.parametrize(("root", "kind"), [("photos", "folder"), ("labels.csv", "csv"), ("images.tar", "folder")])
def test_data_of_ones_own_without_its_name_is_not_replaced_by_digits(root: str, kind: str) -> None:
    with pytest.raises(UserError, match=f"--data.root {root}: .* give its kind, too: --data.name {kind}"):
        load_splits(Data(root=Path(root)), 0)


@pytest.mark.parametrize("option", ["image_column", "label_column"])
def test_data_without_columns(option: str) -> None:
    with pytest.raises(UserError, match=f"--data.{option.replace('_', '-')} x: only csv and hfds/NAME have"):
        load_splits(Data(**{option: "x"}), 0)  # type: ignore[arg-type]
