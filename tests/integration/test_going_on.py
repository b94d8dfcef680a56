"""A run is resumed with changed settings or after its end; damaged files in its directory do not stop it."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch

from accel_train.checkpoint.directory import checkpoint_path, list_updates
from accel_train.config.schema import Schedule
from accel_train.files import read_json_lines, sha256
from accel_train.optim.schedule import LearningRate

SAMPLES, BATCH = 1438, 48  # of digits; 30 updates an epoch
TIMES = {"train_seconds", "images_per_second", "warm_up_seconds", "wall_seconds", "cost", "generation"}


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
    """Return a copy of the run; `until`: as if it had been killed after that update."""
    shutil.copytree(done, run)
    if until is not None:
        helpers.go_back_to(until, run)
    return run


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
    manifest["files"]["state.json"] = {"size": file.stat().st_size, "sha256": sha256(file)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.ci
def test_another_batch_size_in_the_middle_of_an_epoch(done: Path, tmp_path: Path) -> None:
    run = copied(done, tmp_path / "run", until=40)  # 480 samples of epoch 2
    words = ("digits", "--epochs", 3, "--batch-size", 96, "--log-every-updates", 1)
    words += ("--allow-change", "batch-size", "epochs", "--output-dir", run)
    ended = helpers.run(*words, processes=2)
    assert ended.returncode == 0, ended.stderr
    assert [line["count"] for line in helpers.lines_of(run, "eval", "train")] == [SAMPLES] * 3
    assert (result(run)["updates"], result(run)["epochs"]) == (40 + 10 + 15, 3)
    newest = json.loads((checkpoint_path(run / "checkpoints", 65) / "state.json").read_text())
    assert newest["train"]["samples_seen"] == 3 * SAMPLES

    # The third epoch has the rates of the third epoch of a run that always had this batch size.
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.05)
    schedule = LearningRate(Schedule(name="cosine"), optimizer, updates=45, updates_per_epoch=15)
    for line in helpers.lines_of(run, "train")[-15:]:
        schedule.step_update(line["update"] - 65 + 45 - 1)
        assert line["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.ci
def test_other_samples_wait_for_the_epochs_end(done: Path, tmp_path: Path) -> None:
    run = copied(done, tmp_path / "run", until=40)
    before = contents(run)
    words = ("digits", "--epochs", 3, "--data.train-limit", 500, "--allow-change", "data", "epochs")
    refused = helpers.run(*words, "--output-dir", run)
    assert refused.returncode == 2, refused.stdout
    (error,) = refused.stderr.splitlines()
    assert "is in the middle of epoch 2" in error and "1438 -> 500 training samples" in error
    assert contents(run) == before
    # The way that the message tells.
    assert "another --output-dir and --resume from a checkpoint at the end of an epoch" in error
    ended = helpers.run(*words, "--resume", checkpoint_path(run / "checkpoints", 30), "--output-dir", tmp_path / "new")
    assert ended.returncode == 0, ended.stderr
    assert [line["count"] for line in helpers.lines_of(tmp_path / "new", "eval", "train")] == [500, 500]
    assert result(tmp_path / "new")["updates"] == 30 + 2 * 11


def test_a_place_that_does_not_fit_what_was_counted_is_refused(done: Path, tmp_path: Path) -> None:
    run = copied(done, tmp_path / "run", until=40)
    altered(checkpoint_path(run / "checkpoints", 40), epoch_samples=480 - BATCH)  # one window twice
    ended = helpers.run("digits", "--epochs", 2, "--output-dir", run)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert f"has {SAMPLES} samples: update 40 is not in epoch 2 of it" in ended.stderr
    assert not (run / "result.json").exists()


@pytest.mark.ci
def test_a_finished_run_goes_on_to_a_later_end_elsewhere(done: Path, tmp_path: Path) -> None:
    run, longer = copied(done, tmp_path / "a run"), tmp_path / "longer"
    before = contents(run)
    words = ("digits", "--epochs", 4, "--batch-size", 96, "--allow-change", "batch-size", "epochs")
    refused = helpers.run(*words, "--output-dir", run)
    assert refused.returncode == 2, refused.stdout
    (error,) = refused.stderr.splitlines()
    assert "finished run of 2 epochs" in error and "epochs: 2 -> 4; batch-size: 48 -> 96" in error
    way = error.partition(", with ")[2]
    assert shlex.split(way) == ["--resume", str(run)]

    ended = helpers.run(*words, *shlex.split(way), "--output-dir", longer)
    assert ended.returncode == 0, ended.stderr
    assert [line["count"] for line in helpers.lines_of(longer, "eval", "train")] == [SAMPLES] * 2
    assert (result(longer)["epochs"], result(longer)["updates"]) == (4, 60 + 2 * 15)
    again = helpers.run(*words, "--output-dir", longer, "--data.workers", 1)
    assert again.returncode == 0 and "Nothing is left to do" in again.stdout
    assert contents(run) == before


def test_damaged_files_are_set_aside_and_the_run_ends_as_it_did(done: Path, tmp_path: Path) -> None:
    run = copied(done, tmp_path / "run")
    good = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    bad = [
        b"\n",
        b"\xff\xfe\n",
        b"[1]\n",
        b'{"update": 3}\n',
        b'{"kind": "train", "update": "3"}\n',
        b"[" * 9999 + b"\n",
    ]
    (run / "metrics.jsonl").write_bytes(b"".join([*good[:3], *bad, *good[3:]]))
    for name in ("result.json", "status.json", "model.json", "environment.json"):
        (run / name).write_bytes(b"[1]\xff")
    refused = helpers.run("digits", "--epochs", 2, "--output-dir", run)
    assert refused.returncode == 2 and "result.json is damaged. Delete it" in refused.stderr
    (run / "result.json").unlink()
    ended = helpers.run("digits", "--epochs", 2, "--output-dir", run)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert all(line in (run / "metrics.jsonl").read_bytes().splitlines(keepends=True) for line in bad)
    read = [line["update"] for line in read_json_lines(run / "metrics.jsonl", "train")]
    assert [update for update in read if update != "3"] == [line["update"] for line in helpers.lines_of(done, "train")]
    assert result(run) == result(done)
    for name in ("status.json", "model.json", "environment.json"):
        json.loads((run / name).read_text())


def test_a_finished_run_is_taken_to_another_directory(done: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = helpers.run("digits", "--epochs", 2, "--resume", done / "checkpoints", "--output-dir", run)
    assert ended.returncode == 0, ended.stderr
    assert (run / "model.safetensors").read_bytes() == (done / "model.safetensors").read_bytes()
    assert list_updates(run / "checkpoints") == [60]
    assert result(run) == result(done)
    assert helpers.lines_of(run, "train") == []
