"""Every packaged recipe trains for a few updates, on data of the shape that it is for."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from accel_train.cli import main
from accel_train.config.options import parse
from accel_train.config.recipe import recipe_names

SHAPES = {"mnist": (1, 28), "fashion_mnist": (1, 28), "cifar10": (3, 32)}


pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of JPEGs of many sizes: as one tree, and as train/ and val/."""
    root = tmp_path_factory.mktemp("photos")
    generator = torch.Generator().manual_seed(0)
    for split in ("one/", "two/train/", "two/val/"):
        for label in ("Cat", "Dog"):
            folder = root / split / label
            folder.mkdir(parents=True)
            for number in range(12):
                height, width = torch.randint(20, 90, (2,), generator=generator).tolist()
                pixels = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(folder / f"{number}.jpg")
    return root


def small(recipe: str, tree: Path, splits: Path) -> list[str]:
    """Return the options that shorten a recipe to two updates. The folders: as one tree, and as train/ and val/."""
    config = parse([recipe])
    options = ["--epochs", "1", "--batch-size", "8", "--log-every-updates", "1", "--data.train-limit", "16"]
    if config.micro_batch_size is not None:
        options += ["--micro-batch-size", "4", "--virtual-batch-size", "4"]
    elif config.virtual_batch_size is not None:
        options += ["--virtual-batch-size", "4"]
    if config.model.eval_image_size is not None:
        options += ["--model.eval-image-size", "112"]
    if config.schedule.warmup_epochs:
        options += ["--schedule.warmup-epochs", "0.5"]
    if config.data.name == "folder":
        options += ["--data.root", str(tree if config.data.test_fraction else splits), "--data.workers", "0"]
        options += ["--model.image-size", "96"]  # 224 takes five times as long
        options += ["--augment.resize", "112", "--augment.crop-fraction", "none"]
    elif config.data.name in SHAPES:
        channels, size = SHAPES[config.data.name]
        options += ["--data.name", "synthetic", "--data.channels", str(channels)]
        options += ["--model.image-size", str(config.model.image_size or size)]
    return [*options, "--data.test-limit", "4", "--eval-batch-size", "4"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipe_names())
def test_recipe_runs(recipe: str, photos: Path, tmp_path: Path) -> None:
    words = small(recipe, photos / "one", photos / "two")
    assert main(["train", recipe, *words, "--output-dir", str(tmp_path / "run")]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (result["recipe"], result["updates"], result["train_images"]) == (recipe, 2, 16)
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) == 2 and all(loss is not None and 0 < loss < 100 for loss in losses)
    evaluated = {(line["split"], line["count"]) for line in lines if line["kind"] == "eval"}
    assert ("train", 16) in evaluated and evaluated & {("val", 4), ("test", 4), ("test", 2)}


@pytest.mark.ci
@pytest.mark.parametrize("recipe", recipe_names())
def test_config_only(
    recipe: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed configuration is the same recipe."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", recipe, *small(recipe, photos / "one", photos / "two"), "--config-only"]) == 0
    printed = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "again.yaml").write_text(printed)
    again, first = parse(["again.yaml"]), parse([recipe, *small(recipe, photos / "one", photos / "two")])
    assert (again.data, again.model, again.optim, again.augment) == (
        first.data,
        first.model,
        first.optim,
        first.augment,
    )
