"""What follows an update: what is counted and logged, and whether the loop goes on, evaluates, saves or stops."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from accel_train.checkpoint.state import TrainState
from accel_train.config.schema import Checkpoint, Config
from accel_train.data.order import NO_END, Plan, TrainingSampler, UpdateSize
from accel_train.records.events import UpdateDone
from accel_train.run.run import Run


def run_at(
    update: int,
    *,
    every: int | None = None,
    evaluates: int | None = None,
    ends: int = NO_END,
    stop: bool = False,
    save: bool = False,
) -> Any:
    """A run after `update` of the 10 updates of an epoch, whose last one has 5 samples. What surrounds it is mocked."""
    run = Run.__new__(Run)
    run.config = Config(log_every_updates=4, eval_every_updates=evaluates, checkpoint=Checkpoint(every_updates=every))
    run.state = TrainState(update=update, epoch_samples=10 * update, epoch_count=10 * update, samples_seen=10 * update)
    run.setup = Mock(sampler=TrainingSampler(Plan(95, 10, 1, 1, updates=ends), 0))
    for name in ("meter", "stopwatch", "ledger", "pace", "emit", "watchdog"):
        setattr(run, name, Mock())
    run._told, run._tell_seconds = 0.0, 0.0
    run.checkpoints, run._failures = Mock(committed=[], failures=[]), 0
    run.stop_requests = SimpleNamespace(poll=lambda: (stop, save))  # type: ignore[assignment]
    run.guard = Mock()
    return run


@pytest.mark.parametrize(
    ("update", "asked", "then", "logged"),
    [
        (1, {}, "go on", False),
        (3, {}, "go on", True),  # the fourth: a line of the log is due
        (9, {}, "go on", True),  # the epoch ends, and its last samples are counted
        (1, {"save": True}, "save", True),
        (1, {"every": 2}, "save", True),
        (1, {"every": 3}, "go on", False),
        (1, {"evaluates": 2}, "evaluate", True),
        (1, {"evaluates": 2, "every": 2}, "evaluate", True),  # it saves after the evaluation
        (1, {"evaluates": 2, "stop": True}, "stop", True),  # the next start evaluates
        (9, {"evaluates": 2}, "go on", True),  # the epoch's end evaluates
        (1, {"evaluates": 2, "ends": 2}, "go on", True),  # and so does the run's
        (1, {"every": 2, "ends": 2}, "go on", True),
        (9, {"save": True}, "go on", True),  # it saves after the evaluation
        (1, {"stop": True}, "stop", True),
        (9, {"stop": True, "save": True}, "stop", True),
    ],
)
def test_what_the_loop_has_to_do(update: int, asked: dict[str, Any], then: str, logged: bool) -> None:
    run = run_at(update, **asked)
    size = run.setup.sampler.size_at(run.state.epoch_samples)
    run.count_update(size, applied=True)
    found = run.due(ends_epoch=size.is_last)
    assert (found.stop, found.log) == (then == "stop", logged)
    if not found.stop:  # it comes first
        assert ("evaluate" * found.evaluate or "save" * found.save or "go on") == then
    [event] = [call.args[0] for call in run.emit.call_args_list]
    assert isinstance(event, UpdateDone)
    assert event.line_due == logged
    assert run.state.update == update + 1
    assert run.save_is_due == (asked.get("save", False) or asked.get("every") == 2)


def test_the_sinks_are_told_of_an_update_with_a_line_of_the_log_and_of_others_from_time_to_time() -> None:
    run = run_at(0)
    run._tell_seconds = math.inf
    told = []
    for _ in range(8):
        run.count_update(UpdateSize(10, 10, is_last=False), applied=True)
        run.due(ends_epoch=False)
        told += [call.args[0].update for call in run.emit.call_args_list]
        run.emit.reset_mock()
        if run.state.update == 5:
            run._tell_seconds = 0.0
    assert told == [4, 6, 7, 8]


@pytest.mark.parametrize(("applied", "left_out", "seen"), [(True, 2, 8), (False, 10, 0)])
def test_samples_that_are_unreadable_or_skipped_are_left_out(applied: bool, left_out: int, seen: int) -> None:
    run = run_at(0)
    run.count_update(UpdateSize(10, 8, is_last=False), applied=applied)
    state = run.state
    assert (state.epoch_samples, state.epoch_left_out, state.samples_seen) == (10, left_out, seen)
    assert (run.meter.commit.called, run.meter.discard.called) == (applied, not applied)
