"""A run goes on with something changed."""

import json
import shutil
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch

from accel_train import commit, optim
from accel_train.config import Schedule
from accel_train.data.order import Plan
from accel_train.train_state import TrainState

SAMPLES, BATCH = 1438, 48  # of digits; 30 updates an epoch
TIMES = {"train_seconds", "images_per_second", "warm_up_seconds", "wall_seconds"}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of two epochs, with many checkpoints. Copy it to change it."""
    run = tmp_path_factory.mktemp("done") / "run"
    ended = helpers.run(
        "digits", "--epochs", 2, "--checkpoint.every-updates", 8, "--checkpoint.keep", 20, "--output-dir", run
    )
    assert ended.returncode == 0, ended.stderr
    return run


def copied(done: Path, run: Path, until: int | None = None) -> Path:
    """A copy of the run; `until`: as if it had been killed after that update."""
    shutil.copytree(done, run)
    if until is not None:
        for name in ("result.json", "model.safetensors"):
            (run / name).unlink()
        for update in commit.updates(run / "checkpoints"):
            if update > until:
                commit.delete(run / "checkpoints", update)
    return run


def lines(run: Path, kind: str, split: str | None = None) -> list[dict[str, Any]]:
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == kind and line.get("split") == split]


def result(run: Path, name: str = "result.json") -> dict[str, Any]:
    found = json.loads((run / name).read_text())
    return {key: value for key, value in found.items() if key not in TIMES}


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def altered(checkpoint: Path, **train: Any) -> None:
    """Alter a checkpoint's state.json, and its manifest."""
    file = checkpoint / "state.json"
    state = json.loads(file.read_text())
    state["train"] |= train
    file.write_text(json.dumps(state))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"size": file.stat().st_size, "sha256": commit.sha256(file)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_another_batch_size_in_the_middle_of_an_epoch(done: Path, tmp_path: Path) -> None:
    run = copied(done, tmp_path / "run", until=40)  # 480 samples of epoch 2
    words = ("digits", "--epochs", 3, "--batch-size", 96, "--log-every-updates", 1)
    words += ("--allow-change", "batch-size", "epochs", "--output-dir", run)
    ended = helpers.run(*words, processes=2)
    assert ended.returncode == 0, ended.stderr
    assert [line["count"] for line in lines(run, "eval", "train")] == [SAMPLES] * 3
    assert (result(run)["updates"], result(run)["epochs"]) == (40 + 10 + 15, 3)
    newest = json.loads((commit.directory(run / "checkpoints", 65) / "state.json").read_text())
    assert newest["train"]["samples_seen"] == 3 * SAMPLES

    # The third epoch has the rates of the third epoch of a run that always had this batch size.
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.05)
    schedule = optim.create_schedule(Schedule(name="cosine"), optimizer, epochs=3, updates_per_epoch=15)
    for line in lines(run, "train")[-15:]:
        schedule.step_update(line["update"] - 65 + 45 - 1)
        assert line["lr"] == optimizer.param_groups[0]["lr"]


def test_other_samples_wait_for_the_epochs_end(done: Path, tmp_path: Path) -> None:
    run = copied(done, tmp_path / "run", until=40)
    before = contents(run)
    words = ("digits", "--epochs", 3, "--data.train-limit", 500, "--allow-change", "data", "epochs")
    refused = helpers.run(*words, "--output-dir", run)
    assert refused.returncode == 2, refused.stdout
    (error,) = refused.stderr.splitlines()
    assert "is in the middle of epoch 2" in error and "1438 -> 500 training samples" in error
    assert contents(run) == before
    # The way that the message shows.
    named = error.partition("--resume ")[2].removesuffix(".")
    assert named == str(run / "checkpoints" / "update-00000030")
    ended = helpers.run(*words, "--resume", named, "--output-dir", tmp_path / "new")
    assert ended.returncode == 0, ended.stderr
    assert [line["count"] for line in lines(tmp_path / "new", "eval", "train")] == [500, 500]
    assert result(tmp_path / "new")["updates"] == 30 + 2 * 11


def test_a_wrong_count_of_an_epochs_samples_is_an_error(done: Path, tmp_path: Path) -> None:
    run = copied(done, tmp_path / "run", until=40)
    altered(commit.directory(run / "checkpoints", 40), epoch_samples=480 - BATCH)  # one window twice
    ended = helpers.run("digits", "--epochs", 2, "--output-dir", run)
    assert ended.returncode == 1
    assert f"epoch 2 counted {SAMPLES + BATCH} samples and left out 0" in ended.stderr
    assert not (run / "result.json").exists()


@pytest.mark.parametrize(
    ("count", "left_out", "position", "drop_last", "right"),
    [
        (100, 0, 100, False, True),
        (90, 0, 90, True, True),
        (70, 30, 100, False, True),
        (60, 30, 90, True, True),
        (0, 0, 0, False, False),
        (90, 0, 90, False, False),
        (60, 0, 60, True, False),
        (100, 0, 90, True, False),
        (70, 0, 100, False, False),
        (130, 0, 130, False, False),
    ],
)
def test_an_epoch_is_all_of_the_data(count: int, left_out: int, position: int, drop_last: bool, right: bool) -> None:
    state = TrainState(epoch_count=count, epoch_left_out=left_out, epoch_samples=position)
    plan = Plan(100, 30, 1, 1, drop_last)
    if right:
        state.check_epoch(plan)
    else:
        with pytest.raises(RuntimeError, match="but the training data has 100"):
            state.check_epoch(plan)
