"""Every recipe has a description, sets only existing options, and its model fits its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from accel_train.config.options import parse
from accel_train.config.recipe import RECIPES, recipe_names
from accel_train.data.loading import create_input_pipeline
from accel_train.data.order import EvaluationSampler
from accel_train.data.sources.load import load_splits
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.environment import Launch
from accel_train.models import create_model, input_size
from accel_train.optim.optimizer import create_optimizer
from accel_train.optim.schedule import LearningRate

SHAPES = {  # of the data: classes, channels, native size
    "digits": (10, 1, 8),
    "mnist": (10, 1, 28),
    "fashion_mnist": (10, 1, 28),
    "cifar10": (10, 3, 32),
    "data/PetImages": (2, 3, None),
    "data/imagenet": (1000, 3, None),
}


def read(name: str) -> dict[str, Any]:
    settings = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    assert isinstance(settings, dict)
    return settings


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_says_what_it_is(name: str) -> None:
    about = read(name)["about"]
    assert {"reproduces", "accuracy", "runs_on"} <= set(about)
    assert all(isinstance(value, str) and "\n" not in value.strip() and value for value in about.values())


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_can_be_made(name: str) -> None:
    """Create the recipe's model for its data's shape, its optimizer and its schedule over all epochs."""
    settings = parse([name])
    data = settings.data
    of_data = str(data.root) if data.name == "folder" else data.name
    assert of_data in SHAPES, f"add the shape of {of_data} to SHAPES"
    classes, channels, native = SHAPES[of_data]
    size = input_size(settings.model, native)
    if native is None:
        assert settings.model.image_size == size  # files of all sizes: the recipe must say
    for values in (settings.augment.mean, settings.augment.std):
        assert values is None or len(values) == channels
    model = create_model(settings.model, num_classes=classes, channels=channels, image_size=size)
    assert model.eval()(torch.zeros(2, channels, size, size)).shape == (2, classes)

    optimizer = create_optimizer(settings.optim, model)
    updates = round(settings.epochs * 100)
    schedule = LearningRate(settings.schedule, optimizer, updates=updates, updates_per_epoch=100)
    rates = []
    for update in range(updates):
        schedule.step_update(update)
        rates.append(optimizer.param_groups[0]["lr"])
    assert max(rates) <= settings.optim.lr
    assert max(rates) > 0.9 * settings.optim.lr
    if settings.schedule.name not in ("constant", "plateau"):
        assert rates[-1] < 0.1 * settings.optim.lr


@pytest.mark.parametrize("name", ["cifar10_fast", "cifar10_resnet18", "cifar10_resnet18_sota"])
def test_cifar10_as_a_folder_of_images_keeps_its_pixels(tmp_path: Path, name: str) -> None:
    images = torch.randint(256, (2, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for split in ("train", "test"):
        for label, image in zip(("cat", "dog"), images, strict=True):
            (tmp_path / split / label).mkdir(parents=True)
            Image.fromarray(image.numpy()).save(tmp_path / split / label / "0.png")
    data = ["--data.name", "folder", "--data.root", str(tmp_path), "--data.workers", "0"]
    settings = parse([name, *data, "--augment.mean", "0", "0", "0", "--augment.std", "1", "1", "1"])
    splits = load_splits(settings.data, 0)
    feed = create_input_pipeline(
        settings,
        splits,
        splits.test,
        EvaluationSampler(2, 2),
        create_accelerator(Launch()),
        training=False,
        size=input_size(settings.model, splits.image_size),
        memory_format=torch.contiguous_format,
    )
    (batch,) = feed.batches
    assert torch.equal((feed.transform(batch)[0] * 255).round().byte(), images.permute(0, 3, 1, 2))
