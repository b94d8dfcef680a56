"""Training and evaluation with images of different sizes, and a run that is evaluated at another one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from accel_train.cli import main
from accel_train.tools.load_run import load

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

SIZES = ("--model.image-size", "16", "--model.eval-image-size", "24", "--augment.resize", "28")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of 40 x 30 pixels, bright or dark outside the middle: a larger crop sees more of it."""
    root, numbers = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(24):
        pixels = numbers.integers(0, 120, (30, 40, 3), dtype=np.uint8) + np.uint8(120 * (number % 2))
        path = root / ("dark", "light")[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)
    return root


def words(root: Path, run: Path, *more: str) -> list[str]:
    line = "train digits --batch-size 8 --data.name folder --data.workers 0 --data.val-fraction 0.25 --epochs 1 "
    line += "--data.test-fraction 0.25 --augment.crop resized --model.name test_resnet --schedule.name constant"
    return [*line.split(), "--data.root", str(root), "--output-dir", str(run), *more]


def loss_of_result(run: Path) -> float:
    return float(json.loads((run / "result.json").read_text())["test_loss"])


def loss_of(run: Path) -> float:
    found = json.loads((run / "evaluation-test.json").read_text())
    return float((found.get("ema") or found["model"])["loss"])


@pytest.mark.slow
def test_a_run_trains_at_one_size_and_is_evaluated_at_another(photos: Path, tmp_path: Path) -> None:
    small, both = tmp_path / "small", tmp_path / "both"
    assert main(words(photos, small, "--model.image-size", "16", "--augment.resize", "28")) == 0
    assert main(words(photos, both, *SIZES)) == 0
    # The same was learned, and other images were seen in evaluation.
    weights = [load(run).model.state_dict() for run in (small, both)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    losses = [json.loads((run / "result.json").read_text())["test_loss"] for run in (small, both)]
    assert losses[0] != losses[1]
    # What has read the run's folder knows the size, and a run can be evaluated at any size.
    info = load(both).info
    assert (info.image_size, info.training_size) == (24, 16)
    assert load(both).transform(next(photos.rglob("*.png"))).shape == (3, 24, 24)
    assert main(["evaluate", str(both)]) == 0
    assert loss_of(both) == pytest.approx(losses[1], rel=1e-6)
    assert main(["evaluate", str(small), "--model.eval-image-size", "24"]) == 0
    assert loss_of(small) == pytest.approx(losses[1], rel=1e-6)
    assert main(["evaluate", str(both), "--model.eval_image_size=16"]) == 0
    assert loss_of(both) == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.slow
def test_the_evaluation_crops_the_same_fraction_at_any_size(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, cropped = tmp_path / "plain", tmp_path / "cropped"
    line = ["--model.image-size", "16", "--augment.crop", "random"]
    assert main(words(photos, plain, *line)) == 0
    assert main(words(photos, cropped, *line, "--augment.crop-fraction", "0.6")) == 0
    # Training is the same: it resizes as without the option. The evaluation has seen a smaller part of the images.
    weights = [load(run).model.state_dict() for run in (plain, cropped)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert loss_of_result(plain) != loss_of_result(cropped)
    for size, short_side in ((16, 26), (24, 40)):
        sizes = ["--model.eval-image-size", str(size)]
        assert main(["evaluate", str(cropped), *sizes]) == 0
        found = loss_of(cropped)
        assert main(["evaluate", str(plain), *sizes, "--augment.resize", str(short_side)]) == 0
        assert loss_of(plain) == found
        assert size != 16 or found == pytest.approx(loss_of_result(cropped), rel=1e-6)
    capsys.readouterr()
    assert main(["evaluate", str(cropped), "--augment.resize", "28"]) == 2
    message = capsys.readouterr().err
    assert "augment.crop-fraction: expected none with augment.resize" in message and message.count("\n") == 1
    # The way out of it, in both directions.
    assert main(["evaluate", str(cropped), "--augment.resize", "26", "--augment.crop-fraction", "none"]) == 0
    assert main(words(photos, tmp_path / "none", *line, "--augment.crop-fraction", "1.2")) == 2
    assert "expected a number above 0, at most 1" in capsys.readouterr().err


@pytest.mark.slow
def test_predict_and_export_take_the_size_of_evaluation(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, image = tmp_path / "run", str(next(photos.rglob("*.png")))
    assert main(words(photos, run, *SIZES)) == 0
    capsys.readouterr()
    assert load(run).transform(image).shape[-2:] == (24, 24)  # as predict has it
    assert main(["export", str(run), "--format", "pt2", "--output", str(tmp_path / "export")]) == 0
    exported = json.loads((tmp_path / "export" / "preprocess.json").read_text())
    assert exported["size"] == 24
    assert main(["evaluate", str(run), "--model.eval-image-size", "32"]) == 2
    assert "--augment.resize: found 28, but the model's input has 32 pixels" in capsys.readouterr().err


def test_a_size_that_the_model_does_not_take_is_one_line(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = words(photos, tmp_path / "run", "--model.name", "vit_s16_plain", "--model.image-size", "32")
    assert main([*line, "--model.eval-image-size", "48"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "vit_s16_plain does not take images of 48x48" in error
    assert "model.eval_image_size" in error
    assert main(["evaluate", str(tmp_path), "--model.image-size", "48"]) == 2
    assert "that of the run's training; give --model.eval-image-size" in capsys.readouterr().err


def test_a_model_without_an_evaluation_size_has_one_size(photos: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(words(photos, run, "--model.image-size", "16")) == 0
    assert json.loads((run / "model.json").read_text())["trained_at"] is None
    info = load(run).info
    assert info.at_size(None) is info and info.at_size(16) is info
    assert dataclasses.asdict(info.at_size(24).at_size(32))["trained_at"] == 16
