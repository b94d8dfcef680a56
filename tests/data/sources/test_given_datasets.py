"""Datasets that a program gives as objects: TensorDatasets, and those of Hugging Face."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from accel_train.config.schema import Data
from accel_train.data.sources.arrays import ArraySource
from accel_train.data.sources.load import load_splits
from accel_train.data.sources.splits import Splits
from accel_train.errors import UserError
from accel_train.user_code import name_of, provided


def splits_of(value: Any, **options: Any) -> Splits:
    with provided({"data.name": value}):
        return load_splits(Data(name=name_of("data.name", value), **options), 0)


class Plain(Dataset[Any]):
    """The items of a TensorDataset, without being one."""

    def __init__(self, held: TensorDataset) -> None:
        self.held = held

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, number: int) -> Any:
        return self.held[number]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64, torch.float16])
def test_a_tensor_dataset_is_in_memory_and_has_the_images_of_its_items(dtype: torch.dtype) -> None:
    images = (torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 200).to(dtype)
    held = TensorDataset(images, torch.tensor([0, 2, 1, 0, 2, 1]))
    fast, slow = splits_of({"train": held, "test": held}), splits_of({"train": Plain(held)})
    assert isinstance(fast.train, ArraySource) and fast.train.in_memory and not slow.train.in_memory
    assert torch.equal(fast.train.fetch([5, 0, 3]), slow.train.fetch([5, 0, 3]))  # type: ignore[arg-type]
    assert torch.equal(fast.train.labels, slow.train.labels) and fast.classes == slow.classes == ("0", "1", "2")
    assert (fast.mean, fast.std, fast.full_scale) == (slow.mean, slow.std, slow.full_scale)
    assert repr(fast) == "Splits(3 classes (0, 1, 2), 3 channels, 6 train, 6 test images of 4x4 pixels)"


def table(count: int, *, named: bool = True) -> datasets.Dataset:
    label = datasets.ClassLabel(names=["dark", "light"]) if named else datasets.Value("int64")
    features = datasets.Features({"image": datasets.Image(), "label": label})
    colours = [np.full((5, 7, 3), 200 * (number % 2) + number, dtype=np.uint8) for number in range(count)]
    rows = [{"image": Image.fromarray(colour), "label": number % 2} for number, colour in enumerate(colours)]
    return datasets.Dataset.from_list(rows, features=features)


@pytest.mark.parametrize("named", [True, False])
def test_the_datasets_of_hugging_face_are_used_as_they_come(named: bool) -> None:
    given = datasets.DatasetDict(train=table(4, named=named), validation=table(2, named=named).with_format("torch"))
    splits = splits_of(given)
    assert splits.classes == (("dark", "light") if named else ("0", "1"))
    assert splits.validation is not None and len(splits.validation) == 2 and splits.test is None
    assert splits.train.labels.tolist() == [0, 1, 0, 1]
    images = splits.train.fetch([3, 0])
    assert [image.shape for image in images] == [(3, 5, 7)] * 2
    assert [int(image.max()) for image in images] == [203, 0]


def test_a_transform_of_hugging_face_is_not_left_out_in_silence() -> None:
    with pytest.raises(UserError, match="train has a transform of its own, which would be left out"):
        splits_of({"train": table(4).with_transform(lambda rows: rows)})
    with pytest.raises(UserError, match="expected a map-style Dataset"):
        splits_of({"train": table(4).to_iterable_dataset()})


def test_classes_are_compared_by_name_in_each_split() -> None:
    def labelled(names: list[str], labels: list[int]) -> datasets.Dataset:
        return table(len(labels)).remove_columns("label").add_column(
            "label", labels, feature=datasets.ClassLabel(names=names)
        )  # fmt: skip

    train = labelled(["a", "b", "c"], [0, 1, 2])
    splits = splits_of(datasets.DatasetDict(train=train, validation=labelled(["c", "a"], [0, 1, 0])))
    assert splits.validation is not None and splits.validation.labels.tolist() == [2, 0, 2]
    with pytest.raises(UserError, match=r"validation has images of class 'd', which the training split does not name"):
        splits_of(datasets.DatasetDict(train=train, validation=labelled(["a", "d"], [0, 1])))
    unused = splits_of(datasets.DatasetDict(train=train, validation=labelled(["a", "d"], [0, 0])))
    assert unused.validation is not None and unused.validation.labels.tolist() == [0, 0]


def test_labels_of_other_types() -> None:
    def labelled(labels: list[Any], kind: str) -> datasets.Dataset:
        plain = table(len(labels)).remove_columns("label")
        return plain.add_column("label", labels, feature=datasets.Value(kind))

    splits = splits_of(
        datasets.DatasetDict(train=labelled(["dog", "cat"], "string"), test=labelled(["dog", "dog"], "string"))
    )
    assert splits.classes == ("cat", "dog") and splits.train.labels.tolist() == [1, 0]
    assert splits.test is not None and splits.test.labels.tolist() == [1, 1]
    assert splits_of({"train": labelled([0, 1], "uint8")}).train.labels.tolist() == [0, 1]
    for labels, kind in (([0.5, 1.5], "float32"), ([True, False], "bool"), ([2**64 - 1, 0], "uint64")):
        with pytest.raises(UserError, match=r"label|ClassLabel"):
            splits_of({"train": labelled(labels, kind)})


def test_joined_datasets_of_other_classes_are_refused() -> None:
    class Named(TensorDataset):
        def __init__(self, classes: list[str]) -> None:
            super().__init__(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]))
            self.classes = classes

    joined: Any = ConcatDataset([Named(["a", "b"]), Named(["a", "b"])])
    assert splits_of({"train": joined}).classes == ("a", "b")
    joined = ConcatDataset([Named(["a", "b"]), Named(["b", "a"])])
    with pytest.raises(UserError, match=r"train joins datasets of other classes: part 0 has a, b, part 1 has b, a\."):
        splits_of({"train": joined})


def test_classes_without_a_training_image_are_named() -> None:
    images = torch.zeros(4, 1, 4, 4, dtype=torch.uint8)
    splits = splits_of({"train": TensorDataset(images, torch.tensor([1, 2, 1, 2]))})
    assert splits.notes[0].startswith("1 of 3 classes have no training image: '0';")
    assert splits_of({"train": TensorDataset(images, torch.tensor([0, 1, 0, 1]))}).notes == ()
