"""Unreadable images in validation and test splits are found before training, or after the weights are saved."""

from __future__ import annotations

import json
import time
from pathlib import Path

import helpers
import numpy as np
import pytest
from PIL import Image

from accel_train.cli import main
from accel_train.config.schema import Data
from accel_train.data.loading import MOST_HELD_OUT, HeldOutCheck
from accel_train.data.sources.load import load_splits

WORDS = "digits --batch-size 8 --epochs 2 --model.image-size 8 --data.workers 1 --data.name folder --data.root"


def tree(root: Path, splits: tuple[str, ...] = ("train", "test"), count: int = 16) -> Path:
    numbers = np.random.default_rng(0)
    for split in splits:
        for i in range(count):
            path = root / split / "ab"[i % 2] / f"{i}.{('jpg', 'png')[i // 2 % 2]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(numbers.integers(0, 256, (30, 30, 3), dtype=np.uint8)).save(path)
    return root


@pytest.mark.ci
def test_a_bad_test_image_is_told_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, run = tree(tmp_path / "images"), tmp_path / "run"
    for name, processes in (("b/1.jpg", 2), ("b/15.png", 1)):
        bad = root / "test" / name
        whole = bad.read_bytes()
        bad.write_bytes(whole[:-200])  # its header is whole
        words = [*WORDS.split(), str(root), "--output-dir", str(run)]
        if processes > 1:
            done = helpers.run(*words, processes=processes)
            assert done.returncode != 0
            errors = done.stderr
        else:
            assert main(["train", *words]) == 2
            errors = capsys.readouterr().err
        (line,) = [line for line in errors.splitlines() if line.startswith("accel-train: error:")]
        assert f"{bad} cannot be read" in line and "--data.skip-unreadable LIST" in line
        assert not run.exists()
        bad.write_bytes(whole)


@pytest.mark.ci
def test_what_only_the_last_test_finds_leaves_the_weights_and_only_the_test_to_do(tmp_path: Path) -> None:
    bad = tree(tmp_path / "images") / "test" / "a" / "2.png"
    (tmp_path / "images" / "train" / "a" / "x.heic").touch()
    whole = bad.read_bytes()
    bad.write_bytes(whole[:200] + bytes(100) + whole[300:])  # neither header nor end tell
    run = tmp_path / "run"
    words = [*WORDS.split(), tmp_path / "images", "--output-dir", run, "--eval-every-epochs", 5]
    done = helpers.run(*words)
    assert done.returncode == 2 and f"{bad} cannot be read" in done.stderr
    assert "16 training, 16 test images of 2 classes (a, b)\nunused  1 .heic\n" in done.stdout
    assert (run / "model.safetensors").is_file() and not (run / "result.json").exists()

    weights = (run / "model.safetensors").read_bytes()
    (tmp_path / "list").write_text("test/a/2.png\n")
    done = helpers.run(*words, "--data.skip-unreadable", tmp_path / "list")
    assert done.returncode == 0, done.stderr
    result = json.loads((run / "result.json").read_text())
    assert result["test_images"] == 15 and result["updates"] == 4
    assert (run / "model.safetensors").read_bytes() == weights
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["split"] for line in lines if line["kind"] == "eval"] == ["train", "train", "test"]


def test_of_a_large_split_a_sample_is_tried_and_in_little_time(tmp_path: Path) -> None:
    for name in ("train", "val"):
        for kind in "ab":
            (tmp_path / name / kind).mkdir(parents=True)
    first = tmp_path / "val" / "a" / "0.png"
    Image.effect_noise((30, 30), 50).save(first)
    for number in range(1, 2 * MOST_HELD_OUT + 500):
        (tmp_path / "val" / "ab"[number % 2] / f"{number}.png").hardlink_to(first)
    for kind in "ab":
        (tmp_path / "train" / kind / "0.png").hardlink_to(first)
    splits = load_splits(Data(name="folder", root=tmp_path), 0)
    began = time.monotonic()
    tried = [HeldOutCheck(splits, process, 3) for process in range(3)]
    assert sum(len(each._checks) for each in tried) == MOST_HELD_OUT
    for each in tried:
        each._pool.shutdown()
        assert all(found.result() is None for found in each._checks)
    assert time.monotonic() - began < 5
