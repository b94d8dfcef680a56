"""Synthetic images."""

import pickle
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from accel_train.config.schema import Data
from accel_train.data.sources.load import load_splits


def synthetic(**options):
    return load_splits(Data(name="synthetic", root=Path("nowhere"), **options), seed=0)


@pytest.mark.parametrize(("size", "channels", "classes"), [(1, 1, 2), (3, 3, 7), (32, 3, 10), (225, 1, 1000)])
def test_any_size_channels_and_classes(size: int, channels: int, classes: int) -> None:
    found = synthetic(image_size=size, channels=channels, classes=classes, train_images=2000, test_images=11)
    assert (len(found.classes), found.channels, found.image_size) == (classes, channels, size)
    assert (len(found.train), len(found.test), found.validation) == (2000, 11, None)
    images = found.train.fetch([0, 1999, 5])
    assert images.shape == (3, channels, size, size) and images.dtype == torch.uint8
    assert found.train.labels.unique().tolist() == list(range(classes))


def test_an_image_is_a_function_of_its_index() -> None:
    few, many = synthetic(train_images=10, test_images=5), synthetic(train_images=4096, test_images=512)
    batch = many.train.fetch([7, 3, 4095, 3])
    assert torch.equal(batch[1], batch[3]) and not torch.equal(batch[0], batch[1])
    assert torch.equal(few.train.fetch([3, 7]), batch[[1, 0]])
    assert torch.equal(pickle.loads(pickle.dumps(many.train)).fetch([4095])[0], batch[2])
    assert torch.equal(few.test.fetch([4]), many.test.fetch([4]))
    other_seed = load_splits(Data(name="synthetic", train_images=4096), seed=1)
    assert torch.equal(other_seed.train.fetch([7]), batch[:1])  # type: ignore[arg-type]


def test_the_pixels_are_the_same_on_every_machine() -> None:
    images = synthetic(image_size=8).train.fetch(range(16))
    assert images.long().sum().item() == 388428 and images[3, 1, 4, 4].item() == 69


def test_no_two_images_are_equal_and_test_images_are_new() -> None:
    found = synthetic(image_size=8, train_images=3000, test_images=3000)
    images = torch.cat([found.train.fetch(range(3000)), found.test.fetch(range(3000))])
    assert len(images.flatten(1).unique(dim=0)) == 6000


def test_mean_and_deviation_are_about_as_told() -> None:
    found = synthetic(classes=100)
    pixels = found.train.fetch(range(2048)).float() / 255
    assert (pixels.mean((0, 2, 3)) - torch.tensor(found.mean)).abs().max() < 0.05
    assert (pixels.std((0, 2, 3)) - torch.tensor(found.std)).abs().max() < 0.03


def test_it_can_be_learned() -> None:
    found = synthetic(image_size=8, train_images=512, test_images=256)
    train, test = (source.fetch(range(len(source))).flatten(1).numpy() / 255 for source in (found.train, found.test))
    model = LogisticRegression(max_iter=200).fit(train, found.train.labels)
    assert model.score(test, found.test.labels) > 0.95


def test_classes_are_patterns_apart() -> None:
    patterns = synthetic(classes=5).train.patterns
    assert all(not torch.equal(one, other) for one, other in pairwise(patterns))
