"""`accel-train preview`: the picture of what a model will see."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from accel_train.api import preview
from accel_train.cli import main
from accel_train.config.options import parse
from accel_train.data.sources.load import load_splits
from accel_train.errors import UserError
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.environment import Launch
from accel_train.tools.report.preview import augmented_pictures, label_text
from accel_train.tools.report.records import read_run


def folder(root: Path) -> Path:
    """Real image files: red $b and blue pictures, of which a part is darker."""
    for split, count in (("train", 6), ("val", 2)):
        for name, color in (("red $b$", (200, 0, 0)), ("blue", (0, 0, 200))):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                picture = np.full((40, 60, 3), color, np.uint8)
                picture[: 5 + number] //= 2
                Image.fromarray(picture).save(root / split / name / f"{number}.png")
    return root


def test_training_images_and_those_of_the_other_splits_are_shown(tmp_path: Path) -> None:
    root = folder(tmp_path / "data")
    words = ("--data.name", "folder", "--data.root", str(root), "--model.image-size", "32", "--model.name", "resnet18")
    result = preview("digits", *words, "--augment.flip", "1", output=tmp_path / "seen.png", images=5)
    assert len(result.training) == 5
    with Image.open(result.path) as image:
        assert image.format == "PNG" and image.height > image.width  # six rows of four images
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
    assert {(200, 0, 0), (0, 0, 200)} <= colours
    again = preview("digits", *words, "--augment.flip", "1", output=tmp_path / "again.png", images=5)
    assert again.training == result.training


def test_a_flip_is_seen(tmp_path: Path) -> None:
    words = ("--augment.crop", "center", "--augment.pad", "0")
    shown = [
        preview("digits", *words, "--augment.flip", flip, images=1, output=tmp_path / "seen.png").training[0]
        for flip in ("0", "1")
    ]
    plain, flipped = ([np.asarray(image) for image, _ in each.views] for each in shown)
    for views in (plain, flipped):
        assert np.array_equal(views[0], views[1]) and np.array_equal(views[0], views[2])  # the same in each epoch
    np.testing.assert_array_equal(flipped[0], plain[0][:, ::-1])


def test_more_images_than_there_are(tmp_path: Path) -> None:
    shown = preview("digits", "--data.train-limit", "7", images=100, output=tmp_path / "seen.png").training
    assert len(shown) == 7 and len({each.name for each in shown}) == 7


def test_mistakes_leave_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["preview", "digits", "--data.name", "folder", "--data.root", "nowhere"]) == 2
    assert main(["preview", "digits", "--images", "0"]) == 2
    assert main(["preview", "digits", "--output-dir", "run"]) == 2
    assert [*tmp_path.iterdir()] == [] and "Traceback" not in capsys.readouterr().err
    with pytest.raises(UserError, match="--output"):
        preview("digits", output=tmp_path)  # a folder


def test_the_augmented_images_are_those_of_the_first_epochs(digits_run: Path) -> None:
    run = read_run(digits_run)
    config = parse([str(digits_run / "config.yaml")])
    splits = load_splits(config.data, config.seed)
    accelerator = create_accelerator(Launch())
    shown = augmented_pictures(splits, run.info, config, accelerator, samples=6, times=2)
    assert len(shown) == 6 and len({picture.name for picture in shown}) == 6
    assert config.augment.crop == "random" and config.augment.pad == 1
    moved = 0
    for picture in shown:
        (id,) = [id for id in range(len(splits.train)) if splits.train.name(id) == picture.name]
        original = np.pad(splits.train.fetch([id])[0][0].numpy().astype(int), 1)
        for image, label in picture.views:
            assert label == splits.classes[int(splits.train.labels[id])]
            seen = np.asarray(image).astype(int)  # a window of the padded image
            windows = [original[top : top + 8, left : left + 8] for top in range(3) for left in range(3)]
            assert min(np.abs(seen - window).max() for window in windows) <= 1
        moved += picture.views[0] != picture.views[1]
    assert moved >= 3


def test_the_label_of_a_mixed_image_has_its_shares() -> None:
    classes = ("cat", "dog", "bird")
    assert label_text(torch.tensor(1), classes) == "dog"
    assert label_text(torch.tensor([0.25, 0.75, 0.0]), classes) == "dog 75%, cat 25%"
    assert label_text(torch.tensor([0.999, 0.001, 0.0]), classes) == "cat"
    assert label_text(torch.tensor([1.0, 0.0, 1.0]), classes) == "cat, bird"
    assert label_text(torch.zeros(3), classes) == "none"
