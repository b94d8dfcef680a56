"""Signals and the files STOP and SAVE, on which all processes agree: real processes, real signals."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import resource
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import helpers
import pytest
from helpers import started

from accel_train.checkpoint.directory import checkpoint_path, find_newest_checkpoint, list_updates

LONG = ("digits", "--epochs", 200, "--log-every-updates", 5)


def assert_interrupted(run: helpers.Started) -> None:
    """The run has stopped with a whole checkpoint of its last update, and asks to be started again."""
    assert run.status["state"] == "interrupted", run.output
    newest = find_newest_checkpoint(run.run)
    assert newest == checkpoint_path(run.run / "checkpoints", run.status["update"]), run.output
    assert (run.run / "REQUEUE").exists()
    assert run.events[-1]["text"] == "interrupted"


@pytest.mark.ci
def test_signal_to_every_process_of_a_job_with_data_workers(tmp_path: Path) -> None:
    with started(tmp_path / "run", *LONG, "--augment.train-interpolation", "random", "--data.workers", 2) as run:
        run.until_trained(5)
        family = helpers._family(run.popen.pid)
        assert len(family) >= 3  # the trainer and its workers
        for process in reversed(family):
            os.kill(process, signal.SIGUSR1)
        assert run.ended() == 0, run.output
        assert_interrupted(run)
        assert "Stopped by SIGUSR1" in run.output


@pytest.mark.ci
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_terminal_that_closes(tmp_path: Path, processes: int) -> None:
    """SIGHUP reaches the trainer and its workers, or the launcher, which passes it on despite nohup."""
    ours, its = pty.openpty()

    def take_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL if processes == 1 else signal.SIG_IGN)
        fcntl.ioctl(its, termios.TIOCSCTTY, 0)

    words = (*LONG, "--output-dir", tmp_path / "run", "--augment.train-interpolation", "random", "--data.workers", 1)
    popen = subprocess.Popen(
        helpers.command(*words, processes=processes), env=helpers.environment(),
        stdin=its, stdout=its, stderr=its, start_new_session=True, preexec_fn=take_terminal,
    )  # fmt: skip
    os.close(its)
    run = helpers.Started(popen, tmp_path / "run", tmp_path / "log")
    try:
        with open(ours, "rb", buffering=0) as terminal, run.log.open("wb", buffering=0) as log:  # noqa: PTH123
            run.until(
                lambda: (
                    select.select([terminal], [], [], 0)[0] and log.write(terminal.read(1 << 16)),
                    run.status.get("update", 0) >= 5,
                )[1]
            )
        run.ended(60)
        assert_interrupted(run)
        assert run.events[-1]["reason"] == "SIGHUP"
    finally:
        helpers._end(popen)


def test_signal_to_one_of_two_processes_stops_both_and_both_exit_with_0(tmp_path: Path) -> None:
    with started(tmp_path / "run", *LONG, processes=2) as run:
        run.until_trained(5)
        os.kill(run.pids()[1], signal.SIGTERM)
        assert run.ended() == 0, run.output
        assert_interrupted(run)


@pytest.mark.ci
def test_ctrl_c_in_the_launchers_terminal_makes_a_checkpoint(tmp_path: Path) -> None:
    with started(tmp_path / "run", *LONG, processes=2, fresh=True) as run:
        run.until_trained(5)
        os.killpg(run.popen.pid, signal.SIGINT)  # the launcher's
        for process in run.pids():  # in sessions of their own here, unlike on a terminal
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGINT)
        run.ended()
        assert_interrupted(run)
        # one rank answers, and says what to type to have the same processes again
        assert run.output.count("saving after this update; Ctrl-C again stops without saving") == 1
        again = f"go on  launch or submit it as before, with {run.run}/config.yaml --output-dir {run.run}"
        assert again in run.output


@pytest.mark.ci
def test_files_save_and_stop(tmp_path: Path) -> None:
    with started(tmp_path / "run", *LONG, "--checkpoint.every-epochs", 1000) as run:
        run.until_trained(5)
        (run.run / "SAVE").touch()
        run.until(lambda: list_updates(run.run / "checkpoints"))
        assert run.popen.poll() is None
        assert not (run.run / "SAVE").exists()
        (run.run / "STOP").touch()
        assert run.ended() == 0, run.output
        assert_interrupted(run)
        assert not (run.run / "STOP").exists()  # the next start is not stopped by it


def test_file_stop_that_is_there_already_counts_at_the_first_update(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STOP").touch()
    with started(tmp_path / "run", *LONG) as run:
        assert run.ended() == 0, run.output
        assert_interrupted(run)
        assert run.status["update"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signal_while_torch_is_being_imported(tmp_path: Path, number: signal.Signals) -> None:
    """A warning is kept until there is something to save, even where it was ignored before; Ctrl-C ends at once."""
    ignored = "import os, signal, sys; signal.signal(signal.SIGUSR1, signal.SIG_IGN); "
    ignored += "signal.signal(signal.SIGINT, signal.SIG_DFL); "  # a shell's background job is deaf to it
    torch = tmp_path / "early" / "torch.py"  # found first: tells that the import has begun, lasts, then is the real one
    torch.parent.mkdir()
    torch.write_text(
        "import pathlib, sys, time\n"
        f"sys.path.remove({str(torch.parent)!r})\n"
        f"pathlib.Path({str(tmp_path / 'importing')!r}).touch()\n"
        "time.sleep(1)\n"
        "del sys.modules['torch']\n"
        "import torch\n"
    )
    line = helpers.command(*LONG, "--output-dir", tmp_path / "run")
    popen = subprocess.Popen(
        [sys.executable, "-c", f"{ignored} os.execv({sys.executable!r}, {line!r})"],
        env=helpers.environment(PYTHONPATH=str(torch.parent)),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    run = helpers.Started(popen, tmp_path / "run", tmp_path / "run.log")
    try:
        while not (tmp_path / "importing").exists():
            assert popen.poll() is None
            time.sleep(0.01)
        popen.send_signal(number)
        output, _ = popen.communicate(timeout=90)
    finally:
        popen.kill()
    (tmp_path / "run.log").write_text(output)
    if number == signal.SIGINT:
        assert (popen.returncode, output) == (130, "") and not (tmp_path / "run").exists()
        return
    assert popen.returncode == 0, output
    assert_interrupted(run)
    assert run.status["update"] == 1 and f"Stopped by {number.name}" in output


ONE_LONG_UPDATE = ("digits", "--data.name", "synthetic", "--model.image-size", 8, "--data.channels", 1)
ONE_LONG_UPDATE += ("--data.train-limit", 40000, "--batch-size", 40000, "--micro-batch-size", 1)


def test_second_ctrl_c_stops_at_once_and_names_the_last_checkpoint(tmp_path: Path) -> None:
    short = (*ONE_LONG_UPDATE, "--batch-size", 100, "--stop.updates", 1, "--output-dir", tmp_path / "run")
    assert helpers.run(*short).returncode == 0
    helpers.unfinish(tmp_path / "run")
    with started(tmp_path / "run", *ONE_LONG_UPDATE, "--allow-change", "batch-size", "stop") as run:
        run.until(lambda: run.status.get("state") == "training")
        run.popen.send_signal(signal.SIGINT)
        time.sleep(1.5)  # less would be taken for the same one, handed on by a launcher
        assert run.popen.poll() is None
        assert "accel-train: saving after this update; Ctrl-C again stops without saving" in run.output
        assert "Stopped" not in run.output
        run.popen.send_signal(signal.SIGINT)
        assert run.ended() == 130, run.output
        assert "Stopped without saving.\n  kept   the checkpoint of update 1, the newest complete one\n" in run.output
        assert "Traceback" not in run.output
        assert run.status["state"] == "failed"
        assert "Ctrl-C" in run.status["reason"]
        assert list_updates(run.run / "checkpoints") == [1]
        assert not (run.run / "REQUEUE").exists()


@pytest.mark.slow
def test_second_ctrl_c_stops_at_once_under_a_launcher(tmp_path: Path) -> None:
    """It keeps its ranks from the terminal: it hands the first one on, and makes SIGTERM of the second."""
    with started(tmp_path / "run", *ONE_LONG_UPDATE, processes=2, launcher=True) as run:
        run.until(lambda: run.status.get("state") == "training")
        os.killpg(run.popen.pid, signal.SIGINT)
        time.sleep(1.5)
        assert "saving after this update" in run.output and run.popen.poll() is None
        os.killpg(run.popen.pid, signal.SIGINT)
        assert run.ended(20) != 0  # after 30 s the launcher would kill them
        assert "Stopped without saving.\n  kept   nothing, because there is no checkpoint\n" in run.output
        assert run.status["state"] == "failed"


@pytest.mark.slow
def test_ctrl_c_at_a_terminal_saves_and_ends_a_loop_of_the_shells(tmp_path: Path) -> None:
    line = shlex.join(helpers.command(*LONG, "--output-dir", tmp_path / "run"))
    main, side = pty.openpty()
    environment = helpers.environment(TERM="xterm", COLUMNS="200")
    with subprocess.Popen(
        ["bash", "-c", f"for seed in 1 2; do {line}-$seed --seed $seed; echo code $?; done"], env=environment,
        stdin=side, stdout=side, stderr=side, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) or signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as popen:  # fmt: skip
        os.close(side)
        run = helpers.Started(popen, tmp_path / "run-1", tmp_path / "log")
        shown = b""
        pressed = False
        with contextlib.suppress(OSError):  # Linux says so when the terminal is no longer open
            while content := os.read(main, 65536):
                shown += content
                if not pressed and run.status.get("update", 0) >= 5:
                    os.write(main, b"\x03")
                    pressed = True
        code = popen.wait(30)
    (tmp_path / "log").write_bytes(shown)
    assert_interrupted(run)
    assert "nothing is lost" in run.output and "Traceback" not in run.output
    assert code == -signal.SIGINT, run.output  # as a shell does whose program has died of Ctrl-C, and not else
    assert not (tmp_path / "run-2").exists()
    assert not re.search(r"(?m)^code \d", run.output)  # a path in the output may contain the word


@pytest.mark.ci
def test_signal_during_an_evaluation(tmp_path: Path) -> None:
    long_evaluation = ("--data.name", "synthetic", "--model.image-size", 8, "--data.channels", 1)
    long_evaluation += ("--data.train-limit", 96, "--data.test-limit", 20000, "--eval-batch-size", 4)

    def evaluations(run: helpers.Started) -> list[str]:
        return [line["split"] for line in helpers.lines_of(run.run, "eval")]

    with started(tmp_path / "run", "digits", "--epochs", 1, *long_evaluation) as run:
        run.until(lambda: (run.run / "metrics.jsonl").exists() and evaluations(run) == ["train"])
        run.popen.send_signal(signal.SIGTERM)
        assert run.ended() == 0, run.output
        assert_interrupted(run)
        assert run.status["update"] == 2
    with started(tmp_path / "run", "digits", "--epochs", 1, *long_evaluation, "--eval-batch-size", 512) as run:
        assert run.ended() == 0, run.output
        assert evaluations(run) == ["train", "test"]
        assert json.loads((run.run / "result.json").read_text())["test_images"] == 20000
        assert not (run.run / "REQUEUE").exists()


def let_saves_fail(run: helpers.Started) -> None:
    """Limit the size of the run's files: a write fails as on a full disk."""
    resource.prlimit(run.popen.pid, resource.RLIMIT_FSIZE, (65536, 65536))


@pytest.mark.ci
def test_last_save_that_fails_is_told_and_requeued_only_after_progress(tmp_path: Path) -> None:
    with started(tmp_path / "run", *LONG) as run:
        run.until(lambda: list_updates(run.run / "checkpoints"))
        let_saves_fail(run)
        run.popen.send_signal(signal.SIGTERM)
        assert run.ended() == 1, run.output
    newest = find_newest_checkpoint(run.run)
    assert newest is not None
    update = int(newest.name.removeprefix("update-"))
    assert run.status["state"] == "failed" and run.status["update"] > update
    kept = f"the checkpoint of update {update}, the newest complete one"
    told = f"but this could not be saved.\n  kept   {kept}\n"
    assert told in run.output
    assert f"but this could not be saved. Kept: {kept}." in run.status["reason"]
    assert "nothing is lost" not in run.output
    assert (run.run / "REQUEUE").read_text().split() == [str(update)]

    # A start that saves nothing: the next would not either.
    with started(tmp_path / "run", *LONG, "--checkpoint.every-epochs", 1000) as run:
        run.until_trained(update + 1)
        let_saves_fail(run)
        run.popen.send_signal(signal.SIGTERM)
        assert run.ended() == 1, run.output
    assert told in run.output
    assert not (run.run / "REQUEUE").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    with helpers.small_disk(tmp_path / "run", "16m") as disk:
        yield disk


def fill(disk: Path) -> None:
    with (disk / "rubbish").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def make_read_only(disk: Path) -> None:
    while subprocess.run(["mount", "-o", "remount,ro", disk], capture_output=True).returncode:
        time.sleep(0.01)  # a file was open for writing


@pytest.mark.ci
@pytest.mark.parametrize(("break_it", "processes"), [(fill, 1), (make_read_only, 2)])
def test_signal_where_nothing_can_be_written_any_more(small_disk: Path, break_it, processes: int) -> None:  # type: ignore[no-untyped-def]
    with started(small_disk, *LONG, "--checkpoint.every-epochs", 1000, processes=processes) as run:
        run.until_trained(5)
        break_it(small_disk)
        for process in run.pids():
            os.kill(process, signal.SIGTERM)
        assert run.ended(25) == 1, run.output  # by itself: not by a watchdog, nor by the launcher's patience
    assert "but this could not be saved.\n  kept   nothing, because there is no checkpoint\n" in run.output
    assert "Traceback" not in run.output.partition("ChildFailedError")[0].partition("torch/distributed")[0], run.output
    assert not (small_disk / "REQUEUE").exists()
