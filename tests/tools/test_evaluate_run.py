"""`accel-train evaluate` on a real run: the metrics of training's own evaluation, and its predictions file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from accel_train import cli
from accel_train.checkpoint.reading import find_weights
from accel_train.cli import evaluate as evaluate_command
from accel_train.config.options import parse
from accel_train.config.schema import Data
from accel_train.data.sources.load import Source, load_splits
from accel_train.records.model_info import read_model_info
from accel_train.tools.load_run import load

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture
def run(digits_run: Path, tmp_path: Path) -> Path:
    """Return a copy of the run that a test may change."""
    return Path(shutil.copytree(digits_run, tmp_path / "run"))


def evaluated(run: Path, *words: str, split: str = "test") -> dict[str, Any]:
    """Evaluate the run and return what the command writes to its JSON file."""
    assert cli.main(["evaluate", str(run), "--split", split, *words]) == 0
    found: dict[str, Any] = json.loads((run / f"evaluation-{split}.json").read_text())
    return found


def loss_by_hand(run: Path, source: Source) -> float:
    info = read_model_info(run)
    pixels = source.fetch(range(len(source)))
    assert isinstance(pixels, torch.Tensor)
    with torch.inference_mode():
        inputs = (pixels / 255 - info.mean[0]) / info.std[0]
        logits = load(run, weights="model").model(inputs)
        return F.cross_entropy(logits, source.labels).item()


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one-line error of `accel-train evaluate …`."""
    assert cli.main(["evaluate", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("accel-train: error: ")


def test_the_figures_are_those_of_the_end_of_training(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated(run)
    result = json.loads((run / "result.json").read_text())
    assert found["model"]["count"] == result["test_images"] == sum(map(sum, found["model"]["confusion"]))
    for key in ("loss", "accuracy"):
        assert found["model"][key] == pytest.approx(result[f"test_{key}"], abs=1e-6)
        assert found["ema"][key] == pytest.approx(result[f"ema_test_{key}"], abs=1e-6)
    assert found["model"]["confusion"] == result["confusion"]
    assert found["model"]["loss"] != found["ema"]["loss"]
    assert (found["model"]["weights"], found["ema"]["weights"]) == ("model.safetensors", "ema.safetensors")
    assert found["classes"] == list("0123456789")

    out = capsys.readouterr().out
    assert f"{found['model']['accuracy']:.2%}" in out
    assert f"{found['ema']['accuracy']:.2%}" in out
    assert f"{found['ema']['class_accuracy'][8]:.2%}" in out
    assert str(run / "evaluation-test.json") in out


def test_the_training_split_is_not_augmented(run: Path) -> None:
    config = parse([str(run / "config.yaml")])
    assert (config.augment.crop, config.augment.pad) == ("random", 1)
    source = load_splits(config.data, config.seed).train
    found = evaluated(run, split="train")["model"]
    assert found["count"] == len(source)
    assert found["loss"] == pytest.approx(loss_by_hand(run, source), abs=1e-5)


def test_other_data_and_other_splits(run: Path) -> None:
    assert evaluated(run, split="val")["model"]["count"] == round(1438 / 10)
    assert evaluated(run, "--data.test-limit", "7")["model"]["count"] == 7
    # Another set of the same classes is normalised as the model's own was.
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(settings.replace("  image_size: null", "  image_size: 8"))
    found = evaluated(run, "--data.name=synthetic", "--data.channels=1", "--data.test-limit=20")
    assert found["model"]["count"] == 20
    assert found["data"]["name"] == "synthetic"
    synthetic = load_splits(Data("synthetic", channels=1, test_limit=20), 0, size=8).test
    assert synthetic is not None
    assert found["model"]["loss"] == pytest.approx(loss_by_hand(run, synthetic), abs=1e-4)


def test_the_worst_of_many_classes_are_shown(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate_command, "SHOWN", 3)
    accuracy = evaluated(run)["ema"]["class_accuracy"]
    out = capsys.readouterr().out
    rows = out.partition("confused with")[2].splitlines()[1:4]
    assert "the 3 classes with the lowest recall, of 10:" in out
    header = next(line for line in out.splitlines() if line.startswith("class "))
    assert header.split()[:5] == ["class", "images", "precision", "recall", "f1"]
    assert len(header) <= 80
    assert [row.split()[0] for row in rows] == [str(at) for at in sorted(range(10), key=lambda at: accuracy[at])[:3]]


@pytest.mark.parametrize("shown", [20, 6])
def test_classes_without_an_image_are_told(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shown: int
) -> None:
    monkeypatch.setattr(evaluate_command, "SHOWN", shown)
    confusion = evaluated(run, "--data.test-limit=4")["ema"]["confusion"]
    empty = [str(label) for label in range(10) if not sum(confusion[label])]
    assert 6 <= len(empty) < 10
    out = capsys.readouterr().out
    assert f"no test images: {', '.join(empty)} ({len(empty)} of 10 classes)" in out.splitlines()
    table = out.partition("confused with")[2].splitlines()
    rows = {words[0]: words[1:] for line in table if (words := line.split()) and words[0].isdigit()}
    listed = [name for name in rows if rows[name][0] == "0"]
    assert listed == (empty if shown == 20 else []) and all(rows[name] == ["0", *["\u2013"] * 3] for name in listed)

    evaluated(run)
    assert "no test images" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--split=val", "--data.val-fraction=0"],
         "--split val: the dataset 'digits' has no such split; it has train and test."),
        (["--split=dev"], "--split: expected one of test, val, train, found 'dev' (command line)."),
        (["--data.only-classes", "0", "1", "2", "3", "4"],
         "the data does not have the classes that {run} was trained on (10 there, 5 here); "
         "choose other data with --data.name or --data.root."),
        (["--data.name=synthetic"], "the images have 3 channels, but the model of {run} takes 1: "
         "give --data.channels 1 if the data can be read that way."),
        (["--checkpoint=update-1"], "update-1 is not a complete checkpoint (update-1/manifest.json is missing); "
         "{run} has update-00000027, update-00000054."),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert told(capsys, str(run), *words) == message.replace("{run}", str(run))
    assert not list(run.glob("evaluation*"))


def test_without_final_weights_the_newest_whole_checkpoint_counts(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = sorted((run / "checkpoints").iterdir())
    assert find_weights(run, Path(older.name))["ema"] == older / "ema.safetensors"
    for weights in run.glob("*.safetensors"):
        weights.unlink()
    assert find_weights(run)["model"] == newer / "model.safetensors"
    with (newer / "optimizer.pt").open("r+b") as file:
        file.write(b"altered")
    assert evaluated(run)["ema"]["weights"] == f"checkpoints/{older.name}/ema.safetensors"
    capsys.readouterr()
    assert f"{newer} is not a complete checkpoint ({newer}/optimizer.pt is altered" in told(
        capsys, str(run), "--checkpoint", str(newer)
    )
    shutil.rmtree(run / "checkpoints")
    assert told(capsys, str(run)) == f"{run} has no weights yet: neither model.safetensors nor a complete checkpoint."


def test_figures_are_shown_even_if_they_cannot_be_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "evaluation-test.json" / "in the way").mkdir(parents=True)
    assert cli.main(["evaluate", str(run)]) == 1
    out, err = capsys.readouterr()
    assert "top-5 accuracy" in out
    assert err.startswith(f"accel-train: warning: {run}/evaluation-test.json cannot be written (")
    assert not list(run.glob(".evaluation*"))


def test_nothing_is_downloaded_into_a_folder_that_only_the_run_names(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, root = run / "config.yaml", tmp_path / "elsewhere"
    text = config.read_text()
    assert "  name: digits\n" in text and "  root: data\n" in text
    config.write_text(
        text.replace("  name: digits\n", "  name: mnist\n").replace("  root: data\n", f"  root: {root}\n")
    )
    assert f"the dataset 'mnist' is not in {root} yet" in told(capsys, str(run))
    assert not root.exists()


def test_the_best_checkpoint_has_a_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older, newer = sorted((run / "checkpoints").iterdir())
    best = json.loads((newer / "state.json").read_text())["train"]["best_update"]
    assert find_weights(run, Path("best"))["model"].parent == run / "checkpoints" / f"update-{best:08d}"
    shutil.rmtree(newer)  # now the best of the newest checkpoint is another than the final weights
    assert evaluated(run, "--checkpoint", "best")["ema"]["weights"] == f"checkpoints/{older.name}/ema.safetensors"
    assert evaluated(run, "--checkpoint", "last")["ema"]["weights"] == "ema.safetensors"
    capsys.readouterr()

    image = str(helpers.write_digits(run, 1)[0])
    for words in (["predict", str(run), image], ["export", str(run), "--format", "pt2"]):
        assert cli.main([*words, "--checkpoint", "best"]) == 0
        assert f"weights: {older}/ema.safetensors" in "".join(capsys.readouterr())
    evaluated(run, "--checkpoint", "best")
    assert cli.main(["report", str(run)]) == 0  # it shows the evaluation that there is
    assert f"checkpoints/{older.name}/ema.safetensors" in (run / "report.html").read_text()

    shutil.rmtree(run / "checkpoints")
    assert f"update-{best:08d} is not a complete checkpoint" in told(capsys, str(run), "--checkpoint", "best")
    result = json.loads((run / "result.json").read_text()) | {"best_update": None}
    (run / "result.json").write_text(json.dumps(result))
    assert "no validation split was evaluated" in told(capsys, str(run), "--checkpoint", "best")


def test_the_logits_are_those_of_the_model(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "more" / "p.npz"
    assert cli.main(["evaluate", str(run), "--predictions", str(file)]) == 0
    assert f"the logits of ema.safetensors: {file}" in capsys.readouterr().out
    found, record = helpers.read_predictions(file), json.loads((run / "evaluation-test.json").read_text())
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


def test_any_number_of_processes_finds_the_same(run: Path, tmp_path: Path) -> None:
    records, files = [], []
    for processes in (1, 2):
        files.append(tmp_path / f"{processes}.npz")
        done = helpers.python("-m", "accel_train", "evaluate", run, "--predictions", files[-1], processes=processes)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("all classes and the confusion counts") == 1
        records.append(json.loads((run / "evaluation-test.json").read_text()))
        assert records[-1]["processes"] == processes
    alone, together = records
    for name in ("model", "ema"):
        for key in ("count", "accuracy", "top5_accuracy", "confusion"):
            assert together[name][key] == alone[name][key]
        assert together[name]["loss"] == pytest.approx(alone[name]["loss"], abs=1e-6)
    one, two = map(helpers.read_predictions, files)
    assert (one.ids == two.ids).all() and (one.labels == two.labels).all()
    np.testing.assert_allclose(one.logits, two.logits, atol=1e-4)
    assert (two.logits.argmax(1) == two.labels).mean() == together["ema"]["accuracy"]


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
    found = helpers.read_predictions(file)
    assert found.paths is not None and all(Path(path).is_file() for path in found.paths)
    names = [Path(path).parent.name for path in found.paths]
    assert names == [found.classes[label] for label in found.labels]


def test_wrong_names_and_broken_files_are_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", str(run), "--predictions", "p.csv"]) == 2
    assert "--predictions: expected a name that ends in .npz, found 'p.csv' (command line)." in capsys.readouterr().err
