"""The exit code of a run that ends: 0, or 1 if something that it should leave could not be written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accel_train.checkpoint import store
from accel_train.checkpoint.directory import Snapshot
from accel_train.cli import main

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
LAST = 10  # updates


def ended(run: Path, monkeypatch: pytest.MonkeyPatch, unsaved: tuple[int, ...] = ()) -> dict[str, Any]:
    """The status of a run that ends with 1; the checkpoints of the updates `unsaved` cannot be written."""
    write = store.write_checkpoint

    def fail(folder: Path, snapshot: Snapshot) -> None:
        if snapshot.state["train"]["update"] in unsaved:
            raise OSError("the disk is full")
        write(folder, snapshot)

    monkeypatch.setattr(store, "write_checkpoint", fail)
    words = ["--data.train-limit", "480", "--checkpoint.every-updates", "3", "--output-dir", str(run)]
    assert main(["train", "digits", "--epochs", "1", *words]) == 1
    status: dict[str, Any] = json.loads((run / "status.json").read_text())
    return status


@pytest.mark.parametrize("stopped", [False, True])
def test_records_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    (tmp_path / "starts.json").mkdir()  # a record that cannot be written
    if stopped:
        (tmp_path / "STOP").touch()
    status = ended(tmp_path, monkeypatch)
    assert "starts.json cannot be written (Is a directory); training goes on" in capsys.readouterr().err
    assert status["state"] == ("interrupted" if stopped else "finished") and status["failed_writes"] > 0
    assert (tmp_path / "result.json").exists() != stopped  # all the rest is done


def test_a_checkpoint_that_failed_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended(tmp_path, monkeypatch, unsaved=(3,))["state"] == "finished"
    assert (tmp_path / "result.json").exists()


@pytest.mark.parametrize("unsaved", [(LAST,), (3, 6, 9, LAST)])
def test_a_run_whose_last_checkpoint_failed_is_not_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, unsaved: tuple[int, ...]
) -> None:
    assert ended(tmp_path, monkeypatch, unsaved)["state"] == "failed"
    assert "The final weights could not be saved: the run is not finished" in capsys.readouterr().out
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize(
    ("name", "state", "message"),
    [
        ("result.json", "failed", "result.json could not be written: the run is not finished"),
        ("model.safetensors", "failed", "the final weights are only in"),
    ],
)
def test_a_result_that_could_not_be_written(
    name: str, state: str, message: str,
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / name).mkdir()
    assert ended(tmp_path, monkeypatch)["state"] == state
    assert message in capsys.readouterr().err
    assert not (tmp_path / "result.json").is_file()
    (tmp_path / name).rmdir()
    words = ["--data.train-limit", "480", "--checkpoint.every-updates", "3", "--output-dir", str(tmp_path)]
    assert main(["train", "digits", "--epochs", "1", *words]) == 0
    assert (tmp_path / "result.json").is_file() and (tmp_path / "model.safetensors").is_file()
