"""An unreadable image in a validation or test split ends the run, and what was trained until then is saved."""

from __future__ import annotations

import json
from pathlib import Path

import helpers
import numpy as np
import pytest
from PIL import Image

from accel_train.checkpoint.directory import list_updates

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
@pytest.mark.parametrize("processes", [1, 2])
def test_after_an_unreadable_validation_image_the_run_goes_on_where_it_was(tmp_path: Path, processes: int) -> None:
    root = tree(tmp_path / "images", ("train", "val", "test"))
    words = [*WORDS.split(), root, "--output-dir"]
    bad, run = root / "val" / "b" / "15.png", tmp_path / "run"
    whole = bad.read_bytes()
    bad.write_bytes(whole[:-200])
    ended = helpers.run(*words, run, processes=processes)
    assert ended.returncode != 0 if processes > 1 else ended.returncode == 2, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if f"{bad} cannot be read" in line]
    assert "`accel-train check-data folder" in line and "--data.skip-unreadable LIST" in line
    assert "Saved: update 2 of 2; correct this, then: " in ended.stderr
    assert list_updates(run / "checkpoints") == [2]  # the first epoch's
    assert json.loads((run / "status.json").read_text())["state"] == "failed"

    bad.write_bytes(whole)
    resumed = helpers.run(*words, run, processes=processes)
    assert resumed.returncode == 0, resumed.stderr
    assert helpers.run(*words, tmp_path / "whole", processes=processes).returncode == 0
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [(line["split"], line["update"]) for line in lines if line["kind"] == "eval"]
    assert evaluations == [("train", 2), ("val", 2), ("train", 4), ("val", 4), ("test", 4)]


@pytest.mark.ci
def test_what_only_the_last_test_finds_leaves_the_weights_and_only_the_test_to_do(tmp_path: Path) -> None:
    bad = tree(tmp_path / "images") / "test" / "a" / "2.png"
    (tmp_path / "images" / "train" / "a" / "x.heic").touch()
    whole = bad.read_bytes()
    bad.write_bytes(whole[:200] + bytes(100) + whole[300:])
    run = tmp_path / "run"
    words = [*WORDS.split(), tmp_path / "images", "--output-dir", run, "--eval-every-epochs", 5]
    done = helpers.run(*words)
    assert done.returncode == 2 and f"{bad} cannot be read" in done.stderr
    assert "16 training, 16 test images of 2 classes\nunused  1 .heic\n" in done.stdout
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
