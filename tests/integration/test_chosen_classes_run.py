"""A run on some classes of a data set is the run on data that has no others, on any number of processes."""

from __future__ import annotations

import json
from pathlib import Path

import helpers
import numpy as np
import pytest
from PIL import Image

from accel_train.cli import main

WORDS = "digits --batch-size 8 --epochs 2 --model.image-size 8 --augment.crop resized --augment.flip 0.5 --bitwise true"
WORDS += " --data.name folder --data.workers 0 --data.val-fraction 0.25 --checkpoint.every-updates 1"
WORDS += " --schedule.name constant"


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a folder of three classes, and one of two of these."""
    roots = {name: tmp_path_factory.mktemp(name) for name in ("three", "two")}
    numbers = np.random.default_rng(0)
    for number in range(48):
        kind = ("bird", "cat", "dog")[number % 3]
        pixels = numbers.integers(0, 256, (9, 12, 3), dtype=np.uint8) // (1 + number % 3)
        for root in roots.values() if kind != "bird" else [roots["three"]]:
            (root / kind).mkdir(exist_ok=True)
            Image.fromarray(pixels).save(root / kind / f"{number}.png")
    return roots


def train(root: Path, run: Path, *others: str, processes: int = 1) -> bytes:
    done = helpers.run(*WORDS.split(), "--data.root", root, "--output-dir", run, *others, processes=processes)
    assert done.returncode == 0, done.stderr
    return (run / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_it_is_the_run_without_the_other_classes(pets: dict[str, Path], tmp_path: Path) -> None:
    expected = train(pets["two"], tmp_path / "two")
    chosen = ("--data.only-classes", "cat", "dog")
    assert train(pets["three"], tmp_path / "chosen", *chosen) == expected
    assert train(pets["three"], tmp_path / "two-processes", *chosen, processes=2) == expected
    train(pets["three"], tmp_path / "interrupted", *chosen, "--stop.updates", "4")
    helpers.unfinish(tmp_path / "interrupted")
    more = (*chosen, "--allow-change", "stop")
    assert train(pets["three"], tmp_path / "interrupted", *more, processes=2) == expected


@pytest.mark.ci
def test_what_a_finished_run_does_follows(
    pets: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "chosen"
    train(pets["three"], run, "--data.only-classes", "dog", "cat", "--epochs", "1")
    assert json.loads((run / "model.json").read_text())["classes"] == ["dog", "cat"]
    assert main(["evaluate", str(run), "--split", "val"]) == 0
    assert "dog         4 " in capsys.readouterr().out
    assert main(["predict", str(run), str(pets["three"] / "bird"), "--output", str(tmp_path / "birds.csv")]) == 0
    answers = {line.split(",")[2] for line in (tmp_path / "birds.csv").read_text().splitlines()[1:]}
    assert answers == {"cat", "dog"}
