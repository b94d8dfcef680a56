"""`accel-train preview`: the picture of what a model will see."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from accel_train.api import preview
from accel_train.cli import main
from accel_train.errors import UserError


def pixels(uri: str) -> Any:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


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
    assert [len(each.views) for each in shown] == [1, 1]  # the same in each epoch
    plain, flipped = (pixels(each.views[0][0]) for each in shown)
    np.testing.assert_array_equal(flipped, plain[:, ::-1])


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
