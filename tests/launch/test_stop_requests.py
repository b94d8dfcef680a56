"""Requests to save and to stop, without a training; tests/integration/test_stopping.py sends them to real runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_train.launch import stopping
from accel_train.launch.stopping import StopAskedError, StopRequests


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StopRequests]:
    """Those of a single process, which looks for files whenever it is asked."""
    monkeypatch.setattr(stopping, "POLL_SECONDS", 0.0)
    monkeypatch.delenv("ACCEL_TRAIN_START", raising=False)
    with StopRequests() as requests:
        requests.begin(tmp_path, 0, 1)
        yield requests
    stopping.recorded.clear()


def test_a_file_is_obeyed_once(requests: StopRequests, tmp_path: Path) -> None:
    assert requests.poll() == (False, False)
    (tmp_path / "SAVE").touch()
    assert [requests.poll() for _ in range(2)] == [(False, True), (False, False)]
    (tmp_path / "STOP").touch()
    assert requests.poll() == (True, False) and requests.reason == "the file STOP"
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_is_requested_during_an_evaluation_is_made_after_it(requests: StopRequests, tmp_path: Path) -> None:
    (tmp_path / "SAVE").touch()
    assert list(requests.interruptible(range(3))) == [0, 1, 2]
    assert [requests.poll() for _ in range(2)] == [(False, True), (False, False)]


def test_a_signal_ends_an_evaluation_after_a_batch_and_what_signals_did_before_is_restored(tmp_path: Path) -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []
    with StopRequests() as requests:
        requests.begin(tmp_path, 0, 1)
        with pytest.raises(StopAskedError):
            for batch in requests.interruptible(range(3)):
                seen.append(batch)
                os.kill(os.getpid(), signal.SIGTERM)
    stopping.recorded.clear()
    assert (seen, requests.reason) == ([0], "SIGTERM")
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_during_the_imports_is_obeyed() -> None:
    stopping.record_stop_signal(signal.SIGUSR1)
    with StopRequests() as requests:
        assert requests.reason == "SIGUSR1"
    stopping.recorded.clear()


def test_the_clock_counts_from_the_last_save(
    requests: StopRequests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: now))
    requests.save_every_seconds = 60
    requests.saved()
    saves = []
    for now in range(1000, 1200, 10):
        if requests.poll() == (False, True):
            saves.append(now)
            requests.saved()
    assert saves == [1070, 1140]


def test_a_request_to_one_process_is_obeyed_by_all_one_update_later(
    requests: StopRequests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = torch.zeros(2, dtype=torch.int64)

    def all_reduce(mine: torch.Tensor, operation: Any, **_: Any) -> Any:
        together = {dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum}[operation]
        mine.copy_(together(mine, others))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    requests._group = "the other process's and this one's"
    answers = []
    for update in range(7):
        if update in (1, 2):
            (tmp_path / "SAVE").touch()  # the second one comes before the first is answered: one save is enough
        others[0] = update == 5  # the other process has got a signal
        answers.append(requests.poll())
    assert answers == [(update == 6, update == 2) for update in range(7)]
    assert requests.reason == ""


def test_sighup_counts_unless_it_is_ignored() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler, counts in ((signal.SIG_DFL, True), (signal.SIG_IGN, False), (lambda *_: None, False)):
            signal.signal(signal.SIGHUP, handler)
            with StopRequests() as requests:
                if counts:
                    os.kill(os.getpid(), signal.SIGHUP)
            assert requests.reason == ("SIGHUP" if counts else "")
            assert signal.getsignal(signal.SIGHUP) == handler
            stopping.recorded.clear()
    finally:
        signal.signal(signal.SIGHUP, before)
