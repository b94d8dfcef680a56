"""Real processes that hang, die and fail, most of them under the real launcher."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import helpers
import pytest
from helpers import started
from PIL import Image

LONG = ("digits", "--epochs", 500, "--log-every-updates", 5)


@pytest.mark.slow
def test_stopped_process_is_named_and_the_run_ended(tmp_path: Path) -> None:
    with started(tmp_path / "run", *LONG, "--hang-timeout-seconds", 4, processes=2, launcher=True) as run:
        run.until_trained(5)
        stopped = run.pids()[1]
        os.kill(stopped, signal.SIGSTOP)
        run.until(lambda: run.status["state"] == "failed")
        os.kill(stopped, signal.SIGCONT)  # else the launcher gives it 30 s to end by SIGTERM
        assert run.ended() != 0
        assert "No progress for" in run.status["reason"]
        assert "The slow one: rank 1 on" in run.status["reason"]
        assert "accel-train: error: No progress for" in run.output
        assert "in fit" in (run.run / "hang" / "rank-0.txt").read_text()
        assert not (run.run / "REQUEUE").exists()


def stop_workers(trainer: int) -> None:
    """Suspend a process's data workers: the children of their server, and not those of the process itself."""
    workers = [child for child in helpers._family(trainer)[1:] if helpers._parent(child) != trainer]
    assert workers
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)


@pytest.mark.slow
def test_process_that_waits_for_data_is_named_and_all_stacks_are_written(tmp_path: Path) -> None:
    words = (*LONG, "--augment.train-interpolation", "random", "--data.workers", 1, "--hang-timeout-seconds", 4)
    with started(tmp_path / "run", *words, processes=2, FRESH_WORKERS="1") as run:
        run.until_trained(5)
        stop_workers(run.pids()[1])
        assert run.ended() != 0
        assert "The slow one: rank 1 on" in run.status["reason"]
        assert "waits for a batch" in run.status["reason"]
        for rank in (0, 1):
            stacks = (run.run / "hang" / f"rank-{rank}.txt").read_text()
            assert stacks.count("Thread 0x") + stacks.count("thread 0x") >= 2
            assert "in fit" in stacks


@pytest.mark.slow
def test_single_process_that_hangs(tmp_path: Path) -> None:
    words = (*LONG, "--augment.train-interpolation", "random", "--data.workers", 1, "--hang-timeout-seconds", 4)
    with started(tmp_path / "run", *words, FRESH_WORKERS="1") as run:
        run.until_trained(5)
        stop_workers(run.popen.pid)
        assert run.ended() == 1
        assert run.status["state"] == "failed"
        assert "waits for a batch" in run.status["reason"]
        assert "in fit" in (run.run / "hang" / "rank-0.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_job_that_was_suspended_for_long_goes_on(tmp_path: Path, processes: int) -> None:
    words = ("--hang-timeout-seconds", 4, "--augment.train-interpolation", "random", "--data.workers", 1)
    with started(tmp_path / "run", *LONG, *words, processes=processes, fresh=True) as run:
        run.until_trained(5)
        family = helpers._family(run.popen.pid)
        for process in family:
            os.kill(process, signal.SIGSTOP)
        update = run.status["update"]
        time.sleep(75)
        for process in reversed(family):
            os.kill(process, signal.SIGCONT)
        run.until_trained(update + 100)
        (run.run / "STOP").touch()
        assert run.ended() == 0, run.output
    assert run.status["state"] == "interrupted", run.output
    assert not (run.run / "hang").exists()


@pytest.mark.ci
def test_killed_process_is_named_first(tmp_path: Path) -> None:
    start = tmp_path / "starts" / "1" / "now"  # as a job script has it
    start.mkdir(parents=True)
    with started(tmp_path / "run", *LONG, processes=2, launcher=True, ACCEL_TRAIN_START=str(start)) as run:
        run.until_trained(5)
        os.kill(run.pids()[1], signal.SIGKILL)
        assert run.ended(60) != 0
        assert run.status["state"] == "failed"
        assert (start / "exit-code").read_text() == "1\n"  # no mistake of the user's, who can continue the run
        assert "A process was killed, or its node is lost: rank 1 on" in run.status["reason"]
        assert first_error(run).startswith("accel-train: error: A process was killed"), run.output


@pytest.mark.ci
@pytest.mark.parametrize("launcher", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_error_of_one_process_ends_both_and_is_named_first(tmp_path: Path, launcher: bool) -> None:
    for number in range(32):
        path = tmp_path / "images" / ("train" if number < 24 else "test") / "ab"[number % 2] / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number,) * 3).save(path)
    (tmp_path / "images" / "train" / "a" / "004.png").write_bytes(b"no image")
    words = ("digits", "--data.name", "folder", "--data.root", tmp_path / "images", "--data.workers", 0)
    words += ("--augment.resize", 8, "--model.image-size", 8, "--batch-size", 8, "--epochs", 50)
    with started(tmp_path / "run", *words, processes=2, launcher=launcher) as run:
        assert run.ended() != 0
        assert run.status["state"] == "failed"
        assert "004.png" in run.status["reason"]
        assert first_error(run).startswith("accel-train: error: "), run.output
        assert "004.png" in first_error(run)


def first_error(run: helpers.Started) -> str:
    return next(line for line in run.output.splitlines() if re.search(r"\b(error|\w*Error)\b:|Traceback|failed", line))
