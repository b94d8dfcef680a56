"""The exit code of a run that ends: 0, or 1 if something that it should leave could not be written."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator

from accel_train.cli import main
from accel_train.errors import UnsavedError
from accel_train.run import ending
from accel_train.run.ending import finish, interrupt


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_whose_records_failed_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopped: bool
) -> None:
    (tmp_path / "starts.json").mkdir()  # a record that cannot be written
    if stopped:
        (tmp_path / "STOP").touch()
    words = ["--data.train-limit", "480", "--output-dir", str(tmp_path)]
    assert main(["train", "digits", "--epochs", "1", *words]) == 1
    assert "starts.json cannot be written (Is a directory); training goes on" in capsys.readouterr().err
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == ("interrupted" if stopped else "finished") and status["failed_writes"] > 0
    assert (tmp_path / "result.json").exists() != stopped  # all the rest is done


def ended(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> SimpleNamespace:
    """A run at its end, after update 7, of which only what is counted is real."""
    values = {
        "failures": [], "failed_records": 0, "last_saved": 7, "unpublished": "", "problem": "", "reason": "SIGTERM",
    } | changes  # fmt: skip
    monkeypatch.setattr(ending, "cost_of", lambda starts: {})
    monkeypatch.setattr(ending, "at_terminal", lambda: False)
    log = SimpleNamespace(
        warn_of_failed_saves=lambda checkpoints: None,
        log_unsaved_end=lambda checkpoints, go_on: "not saved",
        log_end=lambda *_: values["problem"],
        log_interruption=lambda *_: values["problem"],
    )
    return SimpleNamespace(
        checkpoints=SimpleNamespace(**{name: values[name] for name in ("failures", "last_saved", "unpublished")}),
        directory=SimpleNamespace(failures=values["failed_records"]),
        log=log,
        state=SimpleNamespace(update=7),
        stop_requests=SimpleNamespace(end=lambda: None, reason=values["reason"]),
        ledger=SimpleNamespace(end=lambda finished: None, starts=[]),
        console=SimpleNamespace(warn=lambda text: None),
        accelerator=Accelerator(cpu=True),
        save=lambda wait: None,
        is_main=True, evaluations={}, stopwatch=None, began=0.0, resume_command="accel-train train …",
    )  # fmt: skip


@pytest.mark.parametrize("end", [finish, interrupt])
def test_what_failed_on_the_way_is_told_by_the_code(monkeypatch: pytest.MonkeyPatch, end: Any) -> None:
    assert end(ended(monkeypatch)) == 0
    assert end(ended(monkeypatch, failures=["checkpoint of update 3: the disk was full"])) == 1
    assert end(ended(monkeypatch, failed_records=2)) == 1
    with pytest.raises(UnsavedError, match="no result"):
        end(ended(monkeypatch, problem="no result"))


@pytest.mark.parametrize("last_saved", [None, 6])
def test_a_run_whose_last_checkpoint_failed_is_not_finished(
    monkeypatch: pytest.MonkeyPatch, last_saved: int | None
) -> None:
    with pytest.raises(UnsavedError, match="not saved"):
        finish(ended(monkeypatch, last_saved=last_saved, failures=["the disk is full"]))
    with pytest.raises(UnsavedError, match="only in"):
        finish(ended(monkeypatch, unpublished="the final weights are only in checkpoints"))


def test_ctrl_c_at_a_terminal_has_the_shells_code(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ended(monkeypatch, reason="SIGINT")
    assert interrupt(run) == 0
    monkeypatch.setattr(ending, "at_terminal", lambda: True)
    assert interrupt(run) == 130
