"""The exit code of a run that ends: 0, or 1 if something that it should leave could not be written."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from accelerate import Accelerator

from accel_train.checkpoint.train_state import TrainState
from accel_train.cli import main
from accel_train.config.schema import Config
from accel_train.data.order.plan import Plan
from accel_train.errors import UnsavedError
from accel_train.launch.environment import Launch
from accel_train.records.events import Ended
from accel_train.run import ending
from accel_train.run.ending import finish, interrupt

PLAN = Plan(samples=70, batch_size=10, processes=1, accumulation=1, updates=8)


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


def ended(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """A run at its end, after update 7, of which only what is counted is real."""
    values = {
        "failures": [], "failed_records": 0, "last_saved": 7, "unpublished": "", "written": True, "reason": "SIGTERM",
    } | changes  # fmt: skip
    for name in ("cost_of", "final_figures", "next_steps"):
        monkeypatch.setattr(ending, name, lambda *_: {})
    for name in ("example_image", "stopped_text", "precision"):
        monkeypatch.setattr(ending, name, lambda *_, **__: None)
    monkeypatch.setattr(ending, "result_of", lambda *_, **__: {"stopped_by": "epochs", "epochs": 1})
    checkpoints = {name: values[name] for name in ("failures", "last_saved", "unpublished")}
    directory = {"failures": values["failed_records"], "path": Path("run"), "result": lambda _: values["written"]}
    return SimpleNamespace(
        checkpoints=SimpleNamespace(**checkpoints, newest=lambda: Path("update"), kept="update 6"),
        directory=SimpleNamespace(**directory, ask_for_requeue=lambda update: True),
        config=Config(epochs=1), state=TrainState(update=7, epoch=1),
        setup=SimpleNamespace(splits=SimpleNamespace(multi_label=False, to_train_on=[]), plan=PLAN, launch=Launch()),
        stop_requests=SimpleNamespace(end=lambda: None, reason=values["reason"]),
        ledger=SimpleNamespace(end=lambda finished: None, starts=[], start=SimpleNamespace(first_update=0)),
        emit=Mock(), report_saves=Mock(), pace=SimpleNamespace(total_updates=8), accelerator=Accelerator(cpu=True),
        save=lambda wait: None, evaluations={}, stopwatch=SimpleNamespace(warm_up=None), began=0.0,
        resume_command="accel-train train …",
    )  # fmt: skip


@pytest.mark.parametrize("end", [finish, interrupt])
def test_what_failed_on_the_way_is_counted(monkeypatch: pytest.MonkeyPatch, end: Any) -> None:
    assert end(ended(monkeypatch)).failed_writes == 0
    assert end(ended(monkeypatch, failures=["checkpoint of update 3: the disk was full"])).failed_writes == 1
    assert end(ended(monkeypatch, failed_records=2)).failed_writes == 2


def test_what_could_not_be_written_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ended(monkeypatch, written=False)
    with pytest.raises(UnsavedError, match=r"result\.json could not be written"):
        finish(run)
    assert [call.args[0].state for call in run.emit.call_args_list if isinstance(call.args[0], Ended)] == ["failed"]
    with pytest.raises(UnsavedError, match=r"could not be saved\. Kept: update 6"):
        interrupt(ended(monkeypatch, last_saved=6))


@pytest.mark.parametrize("last_saved", [None, 6])
def test_a_run_whose_last_checkpoint_failed_is_not_finished(
    monkeypatch: pytest.MonkeyPatch, last_saved: int | None
) -> None:
    with pytest.raises(UnsavedError, match="could not be saved"):
        finish(ended(monkeypatch, last_saved=last_saved, failures=["the disk is full"]))
    with pytest.raises(UnsavedError, match="only in"):
        finish(ended(monkeypatch, unpublished="the final weights are only in checkpoints"))


def test_what_asked_to_stop_is_told_also_if_nothing_could_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    result = interrupt(ended(monkeypatch, reason="SIGINT"))
    assert (result.finished, result.stopped_by, result.figures) == (False, "SIGINT", {"epochs": 1, "updates": 7})
    with pytest.raises(UnsavedError) as raised:
        interrupt(ended(monkeypatch, reason="SIGINT", last_saved=None))
    assert raised.value.stopped_by == "SIGINT"
