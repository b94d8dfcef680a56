"""Training on a CSV table: the same run as on the folder of its images, resumed exactly, and refused if it changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import helpers
import numpy as np
import pytest
from PIL import Image

from accel_train.cli import main

WORDS = "digits --batch-size 8 --epochs 2 --model.image-size 8 --augment.crop resized --augment.flip 0.5"
WORDS += " --checkpoint.every-updates 1 --checkpoint.keep 100 --data.workers 0 --schedule.name constant"
COUNTS = {"train": 22, "val": 5, "test": 6}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder of two classes and three splits, and labels.csv with the same splits, in a random order."""
    root = tmp_path_factory.mktemp("images")
    numbers = np.random.default_rng(0)
    rows = []
    for split, count in COUNTS.items():
        for number in range(count):
            kind = ("cat", "dog")[number % 2]
            (root / split / kind).mkdir(parents=True, exist_ok=True)
            pixels = numbers.integers(0, 256, (9, 12, 3), dtype=np.uint8) // (1 + number % 2)
            Image.fromarray(pixels).save(root / split / kind / f"{number}.png")
            rows.append(f"{split}/{kind}/{number}.png,{kind},{split}")
    (root / "labels.csv").write_text("\n".join(["path,label,split", *numbers.permutation(rows)]))
    return root


def words(name: str, root: Path, run: Path, *others: object) -> list[str]:
    return [*WORDS.split(), *map(str, ("--data.name", name, "--data.root", root, "--output-dir", run, *others))]


def figures(run: Path) -> dict[str, object]:
    """What result.json and metrics.jsonl say, without times and the name of the data."""
    result = json.loads((run / "result.json").read_text())
    kept = ("updates", "train_images", "test_images", "best_update", "class_accuracy", "confusion")
    accuracies = {name: figure for name, figure in result.items() if name in kept or "_loss" in name or "_acc" in name}
    evaluations = [(line["split"], line["loss"], line["accuracy"]) for line in helpers.lines_of(run, "eval")]
    return {"result": accuracies, "evaluations": evaluations}


@pytest.mark.slow
def test_a_table_trains_to_the_same_bits_as_the_folder(images: Path, tmp_path: Path) -> None:
    table = images / "labels.csv"
    for name, root, processes in (("folder", images, 1), ("csv", table, 1), ("csv", table, 2)):
        line = words(name, root, tmp_path / f"{name}-{processes}", "--bitwise", "true")
        done = helpers.run(*line, processes=processes)
        assert done.returncode == 0, done.stderr
    expected = tmp_path / "folder-1"
    for run in (tmp_path / "csv-1", tmp_path / "csv-2"):
        assert (run / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
        assert figures(run) == figures(expected)
    result = json.loads((expected / "result.json").read_text())
    assert result["train_images"] == COUNTS["train"] and result["test_images"] == COUNTS["test"]


@pytest.mark.slow
def test_it_resumes_exactly_and_a_changed_table_is_refused(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "labels.csv"
    for split in COUNTS:
        (tmp_path / split).symlink_to(images / split)
    head, *rows = (images / "labels.csv").read_text().splitlines()
    table.write_text("\n".join([head, *rows]))
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert main(["train", *words("csv", table, whole)]) == 0
    shutil.copytree(
        whole / "checkpoints/update-00000002", resumed / "checkpoints/update-00000002"
    )  # in the first epoch
    capsys.readouterr()

    line = ["train", *words("csv", table, resumed, "--resume", "must")]
    changed = [row.replace("cat,train", "dog,train") if "train/cat/0" in row else row for row in rows]
    table.write_text("\n".join([head, *changed]))
    assert main(line) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "data: the table has changed" in error
    table.write_text("\n".join([f"{head},age", *(f"{row},{n}" for n, row in enumerate(reversed(rows)))]))
    assert main(line) == 0  # the same rows in another order, and a column that is not used
    assert "unused  column 'age'" in capsys.readouterr().out
    assert (whole / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()

    other = tmp_path / "other.csv"
    other.write_text("\n".join([head, *(row.replace(",test", ",val") for row in rows if ",val" not in row)]))
    assert main(["evaluate", str(whole), "--data.root", str(other), "--split", "val"]) == 0
    assert "csv val, 6 images" in capsys.readouterr().out
    other.write_text("\n".join(row.replace("dog,", "wolf,") for row in [head, *rows]))
    assert main(["evaluate", str(whole), "--data.root", str(other)]) == 2
    assert "class 1 is 'dog' there and 'wolf' here" in capsys.readouterr().err
    assert main(["predict", str(whole), str(images / "test/cat/0.png")]) == 0


EACH_ITS_OWN = """import os, sys
from accel_train.cli import main
os.chdir(sys.argv[1] + '/' + os.environ['RANK'])
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.ci
def test_processes_with_another_table_do_not_train_together(images: Path, tmp_path: Path) -> None:
    for rank in "01":
        (tmp_path / rank).mkdir()
        for split in COUNTS:
            (tmp_path / rank / split).symlink_to(images / split)
        text = (images / "labels.csv").read_text()
        (tmp_path / rank / "labels.csv").write_text(text.replace("cat,test", "dog,test", 1) if rank == "1" else text)
    (tmp_path / "script.py").write_text(EACH_ITS_OWN)
    line = words("csv", Path("labels.csv"), tmp_path / "run")
    done = helpers.python(tmp_path / "script.py", tmp_path, "train", *line, processes=2)
    assert done.returncode == 2
    assert "The processes do not agree: table is " in done.stderr
    assert done.stderr.count("accel-train: error") == 1


@pytest.mark.slow
def test_several_labels_train_from_a_table_and_from_pixels(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, pixels = tmp_path / "labels.csv", tmp_path / "pixels"
    for split in COUNTS:
        (tmp_path / split).symlink_to(images / split)
    head, *rows = (images / "labels.csv").read_text().splitlines()
    cells = [row.split(",") for row in rows]
    labels = ("cat;tame", "dog", ";", "tame;dog")
    rows = [f"{path},{labels[number % 4]},{split}" for number, (path, _, split) in enumerate(sorted(cells))]
    table.write_text("\n".join([head, *rows]))
    line = words("csv", table, tmp_path / "single")
    assert main(["train", *line]) == 2
    assert "use --loss.name bce" in capsys.readouterr().err
    assert main(["shards", "csv", str(pixels), "--data.root", str(table), "--encoding", "raw"]) == 0
    for name, root in (("csv", table), ("wds", pixels)):
        assert main(["train", *words(name, root, tmp_path / name, "--loss.name", "bce")]) == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("csv", "wds")]
    assert weights[0] == weights[1]
    result = json.loads((tmp_path / "csv/result.json").read_text())
    assert result["test_images"] == COUNTS["test"] and 0 < result["test_map"] <= 1
