"""Synthetic images."""

import pickle
from pathlib import Path

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from accel_train.config.options import parse
from accel_train.config.schema import Data
from accel_train.data.sources.load import load_splits, splits_of


def synthetic(size: int = 32, **options):
    return load_splits(Data(name="synthetic", root=Path("nowhere"), **options), seed=0, size=size)


@pytest.mark.parametrize(("size", "channels"), [(1, 1), (3, 3), (32, 3), (225, 1)])
def test_any_size_and_channels(size: int, channels: int) -> None:
    found = synthetic(size, channels=channels, train_limit=2000, test_limit=11)
    assert (len(found.classes), found.channels, found.image_size) == (10, channels, size)
    assert (len(found.train), len(found.test), found.validation) == (2000, 11, None)
    images = found.train.fetch([0, 1999, 5])
    assert images.shape == (3, channels, size, size) and images.dtype == torch.uint8
    assert found.train.labels.unique().tolist() == list(range(10))


def test_their_size_is_that_of_the_models_input() -> None:
    for words, size in (("digits", 32), ("digits --model.image-size 20", 20), ("digits --model.name test_vit", 160)):
        assert splits_of(parse([*words.split(), "--data.name", "synthetic"])).image_size == size


def test_an_image_is_a_function_of_its_index() -> None:
    few, many = synthetic(train_limit=10, test_limit=5), synthetic(train_limit=4096)
    batch = many.train.fetch([7, 3, 4095, 3])
    assert torch.equal(batch[1], batch[3]) and not torch.equal(batch[0], batch[1])
    assert torch.equal(few.train.fetch([3, 7]), batch[[1, 0]])
    assert torch.equal(pickle.loads(pickle.dumps(many.train)).fetch([4095])[0], batch[2])
    assert torch.equal(few.test.fetch([4]), many.test.fetch([4]))
    other_seed = load_splits(Data(name="synthetic", train_limit=4096), seed=1)
    assert torch.equal(other_seed.train.fetch([7]), batch[:1])  # type: ignore[arg-type]


def test_the_pixels_are_the_same_on_every_machine() -> None:
    images = synthetic(8).train.fetch(range(16))
    assert images.long().sum().item() == 388428 and images[3, 1, 4, 4].item() == 69


def test_no_two_images_are_equal_and_test_images_are_new() -> None:
    found = synthetic(8, train_limit=3000, test_limit=3000)
    images = torch.cat([found.train.fetch(range(3000)), found.test.fetch(range(3000))])
    assert len(images.flatten(1).unique(dim=0)) == 6000


def test_mean_and_deviation_are_about_as_told() -> None:
    found = synthetic()
    pixels = found.train.fetch(range(2048)).float() / 255
    assert (pixels.mean((0, 2, 3)) - torch.tensor(found.mean)).abs().max() < 0.05
    assert (pixels.std((0, 2, 3)) - torch.tensor(found.std)).abs().max() < 0.03


def test_it_can_be_learned() -> None:
    found = synthetic(8, train_limit=512, test_limit=256)
    train, test = (source.fetch(range(len(source))).flatten(1).numpy() / 255 for source in (found.train, found.test))
    model = LogisticRegression(max_iter=200).fit(train, found.train.labels)
    assert model.score(test, found.test.labels) > 0.95
