"""The line of a run's beginning that says how many images of each class a split has."""

import torch

from accel_train.data.sources.arrays import ArraySource
from accel_train.data.sources.splits import Splits
from accel_train.records.summary import class_counts


def splits_of(classes: tuple[str, ...], *labels: list[int] | torch.Tensor) -> Splits:
    train, test = (ArraySource("x", torch.zeros(len(each)), torch.as_tensor(each)) for each in labels)
    return Splits(classes, 1, 8, (0.5,), (0.5,), train, None, test)


def test_few_classes_are_named() -> None:
    assert class_counts(splits_of(("cat", "dog"), [0, 0, 1], [1])) == "training 2 cat, 1 dog; test 0 cat, 1 dog"


def test_of_many_the_smallest_and_the_largest_and_those_without_images() -> None:
    many = tuple("abcdefghij")
    text = class_counts(splits_of(many, [*range(10), 3, 3], [0, 0, 1, 1, 2, 2]))
    assert text == "training 1 (a) to 3 (d); test 2 of each, none of d, e, f and 4 more"


def test_several_labels_an_image_and_skipped_ones() -> None:
    rows = torch.tensor([[True, True], [False, True], [False, False]])
    splits = splits_of(("a", "b"), rows, rows[2:])
    assert class_counts(splits) == "training 1 a, 2 b; test 0 a, 0 b"
    many = splits_of(tuple("abcde"), rows[:, [0, 1, 1, 1, 1]], rows[2:, [0, 0, 0, 0, 0]])
    assert class_counts(many) == "training 1 (a) to 2 (b); test none of any class"
