"""A run has one writer: several starts in one directory, and owners that die, are suspended or run elsewhere."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from pathlib import Path

import helpers
import pytest
from helpers import started

from accel_train.checkpoint.directory import checkpoint_path, list_updates
from accel_train.cli import main
from accel_train.launch import process
from accel_train.ownership.owner import FILE, Owner

LONG = ("digits", "--epochs", 500, "--log-every-updates", 5, "--checkpoint.every-updates", 20)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_start_that_is_refused_or_only_shows_its_configuration_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ("", "--output-dir a/b --take-over true"):
        assert main(["train", "digits", "--config-only", "true", *words.split()]) == 0
        assert main(["train", "digits", "--data.name", "folder", "--data.root", "none", *words.split()]) == 2
        assert list(tmp_path.iterdir()) == []
    assert main(["train", "digits", "--resume", "must"]) == 2
    assert list(tmp_path.iterdir()) == []
    assert "take_over" not in capsys.readouterr().out  # else config.yaml would take the run over again and again


def test_a_second_start_is_refused_and_a_killed_owners_run_goes_on_at_once(tmp_path: Path) -> None:
    with started(tmp_path / "run", *LONG) as run:
        run.until_trained(25)
        run.until(lambda: list_updates(run.run / "checkpoints"))
        (run.run / "checkpoints" / ".update-00009999.1.tmp").mkdir()  # as if the owner were saving
        second = helpers.run(*LONG, "--seed", 7, "--output-dir", run.run)
        assert second.returncode == 2, second.stdout
        errors = [line for line in second.stderr.splitlines() if line]
        assert len(errors) == 1 and f"process {run.popen.pid} on " in errors[0], second.stderr
        assert "since 20" in errors[0] and "--take-over true" in errors[0]
        assert "seed: 0" in (run.run / "config.yaml").read_text()
        assert (run.run / "checkpoints" / ".update-00009999.1.tmp").exists()
        before = run.status["update"]
        run.until_trained(before + 5)
        run.popen.send_signal(signal.SIGKILL)  # and it is not waited for: it stays as a zombie
        time.sleep(0.2)
        assert (run.run / FILE).exists()
        (run.run / "REQUEUE").write_text("5\n")
        with started(tmp_path / "run", *LONG) as again:
            again.until(lambda: "continuing after update" in again.output)
            assert not (run.run / "REQUEUE").exists()
            again.until_trained(before)
            again.popen.send_signal(signal.SIGTERM)
            assert again.ended() == 0, again.output
        updates = [line["update"] for line in helpers.lines_of(run.run, "train")]
        assert updates == sorted(set(updates))
        assert not list(run.run.glob("*owner*")) and not list(run.run.glob(".owner*"))


@pytest.mark.slow
def test_two_processes_have_one_owner_and_end_soon_after_their_launcher(tmp_path: Path) -> None:
    with started(tmp_path / "run", *LONG, "--checkpoint.every-updates", 1000, processes=2, fresh=True) as run:
        run.until_trained(5)
        ranks = run.pids()
        started_at = {rank: process.start_time(rank) for rank in ranks}
        assert json.loads((run.run / FILE).read_text())["pid"] == ranks[0]
        run.popen.send_signal(signal.SIGKILL)
        run.popen.wait()
        deadline = time.monotonic() + 20
        while not all(process.has_ended(rank, started_at[rank]) for rank in ranks):
            assert time.monotonic() < deadline, run.output
            time.sleep(0.1)
        assert run.status["state"] == "interrupted" and "the launcher's death" in run.output
        assert list_updates(run.run / "checkpoints")[-1] == run.status["update"]
        assert not (run.run / FILE).exists()


@pytest.mark.ci
def test_a_suspended_owner_whose_run_was_taken_over_ends_and_writes_nothing(tmp_path: Path) -> None:
    with started(tmp_path / "run", *LONG, processes=2) as run:
        run.until_trained(25)
        run.until(lambda: list_updates(run.run / "checkpoints"))
        refused = helpers.run(*LONG, "--output-dir", run.run, processes=2)
        assert refused.returncode != 0 and refused.stderr.count("accel-train: error:") == 1
        assert f"has an owner: process {run.pids()[0]} on" in refused.stderr
        family = run.family()
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        newest = checkpoint_path(run.run / "checkpoints", list_updates(run.run / "checkpoints")[-1])
        epochs = json.loads((newest / "state.json").read_text())["train"]["epoch"] + 1  # to its end, soon
        words = (*LONG, "--take-over", "true", "--allow-change", "epochs", "--epochs", epochs)
        taken = helpers.run(*words, "--output-dir", run.run)
        assert taken.returncode == 0, taken.stdout + taken.stderr
        assert "is taken over from process" in taken.stdout
        # What the next owner might be writing at this moment:
        (run.run / FILE).write_text(json.dumps(dataclasses.asdict(Owner.of_this_process())))
        temporary = run.run / "checkpoints" / ".update-00009999.1.tmp"
        temporary.mkdir()
        before = contents(run.run)
        for pid in reversed(family):
            os.kill(pid, signal.SIGCONT)
        assert run.ended() != 0
        assert run.output.count("Another start has taken") == 1, run.output
        assert contents(run.run) == before and temporary.exists()
