"""The trainer from Python."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import helpers
import pytest
import torch
from PIL import Image

from accel_train.api import evaluate, load_run, predict, train
from accel_train.errors import UserError

SMALL = {"base": "digits", "epochs": 1, "data": {"train_limit": 400, "test_limit": 60}, "optim": {"lr": 1e-2}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that another process has trained, after one with other settings: nothing of that one is left."""
    folder = tmp_path_factory.mktemp("runs")
    script = f"""
from accel_train.api import train
other = train({{**{SMALL!r}, "batch_size": 32, "micro_batch_size": 8, "bitwise": True, "seed": 3}}, "--epochs", "2")
print(other)
print(train({SMALL!r}, "--output-dir", "second"))
"""
    done = helpers.python("-c", script, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "runs/notebook").is_dir()
    return folder / "second"


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, accel_train.api; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=helpers.environment()).returncode == 0


def test_it_trains_what_the_command_line_trains(run: Path, tmp_path: Path) -> None:
    words = ["digits", "--epochs", 1, "--data.train-limit", 400, "--data.test-limit", 60, "--optim.lr", "1e-2"]
    assert helpers.run(*words, "--output-dir", tmp_path / "run").returncode == 0
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "run/model.safetensors").read_bytes()


def test_a_run_is_loaded_with_its_transform_classes_and_figures(run: Path) -> None:
    loaded = load_run(run)
    assert loaded.classes == tuple("0123456789")
    assert not loaded.model.training
    images = sorted((run / "examples").glob("*.png"))
    inputs = torch.stack([loaded.transform(path) for path in images])
    assert inputs.shape == (len(images), 1, 8, 8)
    assert torch.equal(loaded.transform(Image.open(images[0])), inputs[0])
    with torch.inference_mode():
        probabilities = loaded.model(inputs).softmax(1)
    for found in (predict(run, images, top_k=3), loaded.predict(images, top_k=3)):
        assert [each.image for each in found] == images
        for row, prediction in zip(probabilities, found, strict=True):
            values, labels = row.topk(3)
            assert prediction.classes == tuple(loaded.classes[label] for label in labels)
            assert prediction.probabilities == pytest.approx(values.tolist(), abs=1e-6)
    rows = loaded.rows("eval")
    assert [row["split"] for row in rows] == ["train", "test"]
    assert loaded.result is not None
    assert loaded.result["test_accuracy"] == rows[-1]["accuracy"]
    assert load_run(run, checkpoint="update-00000009").weights.parent.name == "update-00000009"


def test_evaluate_returns_the_figures(run: Path) -> None:
    result = evaluate(run, "--data.test-limit", "30")
    assert result["model"]["count"] == 30
    assert result["split"] == "test"
    assert evaluate(run)["model"]["accuracy"] == load_run(run).rows("eval")[-1]["accuracy"]


def test_evaluate_returns_what_it_measured_also_if_that_cannot_be_written(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file of an earlier evaluation has other figures."""
    evaluate(run)

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    assert evaluate(run, "--data.test-limit", "30")["model"]["count"] == 30
    assert f"{run}/evaluation-test.json cannot be written (No space left on device)" in capsys.readouterr().err


def test_a_training_whose_end_cannot_be_saved_raises_what_the_command_line_says(tmp_path: Path) -> None:
    script = f"""
import resource
from pathlib import Path
from accel_train.api import train
from accel_train.errors import UserError

def attempt(name):
    try:
        train({SMALL!r}, "--output-dir", name)
        print("returned")
    except UserError as error:
        print("raised:", error)

for name in ("result.json", "model.safetensors"):
    Path(name, name).mkdir(parents=True)
    attempt(name)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))  # less than a checkpoint
attempt("full")
attempt("full")
"""
    done = helpers.python("-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith(("raised: ", "returned"))]
    assert len(said) == 4, done.stdout
    assert said[0].startswith("raised: result.json/result.json could not be written: the run is not finished.")
    assert said[1].startswith("raised: the final weights are only in model.safetensors/checkpoints: ")
    kept = "Kept: nothing, because there is no checkpoint."
    assert said[2].startswith(f"raised: The final weights could not be saved: the run is not finished. {kept}")
    assert "--output-dir full" in said[2]
    assert said[3] == said[2]


def test_mistakes_are_raised(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        train({"base": "digits", "epoch": 3, "optim": {"lr": "fast"}})
    assert "Did you mean 'epochs'?" in str(raised.value)
    assert "--optim.lr: expected a number, found 'fast' (the settings:" in str(raised.value)
    with pytest.raises(UserError, match="expected words, numbers and lists"):
        train({"base": "digits", "epochs": object()})
    with pytest.raises(UserError, match="such file"):
        load_run(tmp_path)
    (unreadable,) = predict(run, [tmp_path / "none.png"])
    assert (unreadable.classes, unreadable.error) == ((), "No such file or directory")
    with pytest.raises(UserError, match="cannot be read"):
        load_run(run).transform(tmp_path / "none.png")
    with pytest.raises(UserError, match=r"torch.uint8, found torch.float32"):
        load_run(run).transform(torch.zeros(1, 8, 8))


def test_a_notebook_trains_on_two_processes(tmp_path: Path) -> None:
    script = f"""
from accelerate import notebook_launcher
from accel_train.api import load_run, train
notebook_launcher(train, ({SMALL!r}, "--output-dir", "run"), num_processes=2)
run = load_run("run")
print(len(run.rows("eval")), run.result["world_size"])
"""
    done = helpers.python("-c", script, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "2 2"
