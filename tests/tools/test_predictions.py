"""`accel-train evaluate --predictions FILE`: each sample once, the same on any number of processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
import torch
from PIL import Image

from accel_train import cli
from accel_train.config.options import parse
from accel_train.data.sources.load import load_splits
from accel_train.errors import UserError
from accel_train.records.model_info import read_model_info
from accel_train.tools.evaluate_run import Predictions, read_predictions
from accel_train.tools.load_run import load

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture(scope="module")
def run(digits_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(digits_run, tmp_path_factory.mktemp("predictions") / "run"))


def record_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "evaluation-test.json").read_text())
    return found


def test_the_logits_are_those_of_the_model(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "more" / "p.npz"
    assert cli.main(["evaluate", str(run), "--predictions", str(file)]) == 0
    assert f"the logits of ema.safetensors: {file}" in capsys.readouterr().out
    found, record = read_predictions(file), record_of(run)
    config, info = parse([str(run / "config.yaml")]), read_model_info(run)
    test = load_splits(config.data, config.seed).test
    assert test is not None
    assert (found.ids.dtype, found.labels.dtype, found.logits.dtype) == (np.int64, np.int64, np.float32)
    assert found.ids.tolist() == list(range(len(test))) and found.labels.tolist() == test.labels.tolist()
    with torch.inference_mode():
        pixels = torch.as_tensor(test.fetch(range(len(test))))
        logits = load(run).model((pixels / 255 - info.mean[0]) / info.std[0])
    np.testing.assert_allclose(found.logits, logits.numpy(), atol=1e-4)
    assert found.classes == tuple("0123456789") and found.paths is None
    assert found.about["weights"] == record["ema"]["weights"] == "ema.safetensors"
    assert found.about["time"] == record["time"] and found.about["split"] == "test"
    # Exactly the printed accuracy.
    assert (found.logits.argmax(1) == found.labels).mean() == record["ema"]["accuracy"]


@pytest.mark.ci
def test_one_two_and_four_processes_write_the_same(run: Path, tmp_path: Path) -> None:
    files = []
    for processes in (1, 2, 4):
        files.append(tmp_path / f"{processes}.npz")
        done = helpers.python("-m", "accel_train", "evaluate", run, "--predictions", files[-1], processes=processes)
        assert done.returncode == 0, done.stderr
        record = record_of(run)
        assert record["processes"] == processes
        found = read_predictions(files[-1])
        assert (found.logits.argmax(1) == found.labels).mean() == record["ema"]["accuracy"]
    one, *others = map(read_predictions, files)
    for other in others:
        assert (one.ids == other.ids).all() and (one.labels == other.labels).all()
        assert (one.logits.argmax(1) == other.logits.argmax(1)).all()
        np.testing.assert_allclose(one.logits, other.logits, atol=1e-4)


def test_each_evaluation_keeps_its_file(run: Path) -> None:
    before = {*run.glob("evaluations/*.json")}
    checkpoint = min(path.name for path in (run / "checkpoints").iterdir())
    assert cli.main(["evaluate", str(run), "--checkpoint", checkpoint, "--split", "val"]) == 0
    (kept,) = {*run.glob("evaluations/val-*.json")} - before
    newest = run / "evaluation-val.json"
    assert kept.read_text() == newest.read_text()
    assert json.loads(kept.read_text())["ema"]["weights"] == f"checkpoints/{checkpoint}/ema.safetensors"


def test_image_files_have_their_paths(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 3)):
        for name in ("cat", "dög"):
            folder = tmp_path / "pets" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(numbers.integers(256, size=(20, 20, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    run = tmp_path / "run"
    words = ["--data.name=folder", f"--data.root={tmp_path / 'pets'}", "--model.name=digits_cnn", "--batch-size=4"]
    words += ["--model.image-size=16", "--epochs=1", "--data.workers=0", f"--output-dir={run}", "--augment.crop=center"]
    assert cli.main(["train", "digits", *words]) == 0
    file = tmp_path / "p.npz"
    assert cli.main(["evaluate", str(run), "--data.workers=0", "--predictions", str(file)]) == 0
    found = read_predictions(file)
    assert found.paths is not None and all(Path(path).is_file() for path in found.paths)
    names = [Path(path).parent.name for path in found.paths]
    assert names == [found.classes[label] for label in found.labels]


def test_several_labels_are_rows(tmp_path: Path) -> None:
    rows = np.array([[True, False], [True, True], [False, False]])
    logits = np.arange(6, dtype=np.float32).reshape(3, 2)
    written = Predictions(np.arange(3), rows, logits, ["a", "ü", "c"], ("x", "y"), {"split": "test"})
    written.save(tmp_path / "p.npz")
    found = read_predictions(tmp_path / "p.npz")
    assert found.labels.tolist() == rows.tolist() and found.labels.dtype == np.bool_
    assert found.logits.tolist() == logits.tolist() and found.paths == ["a", "ü", "c"]
    assert (found.classes, found.about) == (("x", "y"), {"split": "test"})


def test_wrong_names_and_broken_files_are_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", str(run), "--predictions", "p.csv"]) == 2
    assert "--predictions: expected a name that ends in .npz, found 'p.csv' (command line)." in capsys.readouterr().err
    (tmp_path / "p.npz").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"p\.npz is not a predictions file"):
        read_predictions(tmp_path / "p.npz")


def test_a_compressed_file_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    zeros = np.zeros((1000, 1000), dtype=np.float32)
    np.savez_compressed(tmp_path / "p.npz", ids=np.arange(1000), labels=np.zeros(1000, dtype=np.int64), logits=zeros)
    with pytest.raises(UserError, match=r"it is compressed: [0-9,]+ bytes for 4,0"):
        read_predictions(tmp_path / "p.npz")
