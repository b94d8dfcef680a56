"""docs/from_python.md: a search with Optuna, by several processes, one of which is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import helpers
import pytest

EXAMPLE = helpers.ROOT / "examples" / "optuna_sweep.py"
TRIALS = 6
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # each process imports torch


def worker(folder: Path, output: Path, trials: int = TRIALS) -> subprocess.Popen[bytes]:
    words = [sys.executable, str(EXAMPLE), str(folder), "--trials", str(trials), "--epochs", "3", "--heartbeat", "5"]
    with output.open("ab") as file:
        return subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=helpers.environment())


def trials(folder: Path) -> list[Any]:
    optuna = pytest.importorskip("optuna")
    return optuna.load_study(study_name="sweep", storage=f"sqlite:///{folder / 'study.db'}").trials  # type: ignore[no-any-return]


def events(run: Path, text: str) -> list[dict[str, Any]]:
    return [line for line in helpers.lines_of(run, "event") if line["text"] == text]


def test_processes_share_a_study_that_goes_on_after_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="optuna is not installed (pip install optuna)")
    folder, output = tmp_path / "sweep", tmp_path / "output"
    first = worker(folder, output)
    deadline = time.monotonic() + 200
    try:  # kill it in its second trial, after a checkpoint
        while not (saved := list(folder.glob("trial-001/checkpoints/update-*"))) and time.monotonic() < deadline:
            assert first.poll() is None, output.read_text()
            time.sleep(0.02)
        assert saved, output.read_text()
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert not (folder / "trial-001" / "result.json").exists()
    time.sleep(15)  # three missed signs of life; with shorter ones a busy machine takes a living worker for dead
    both = [worker(folder, output) for _ in range(2)]
    assert [each.wait(timeout=300) for each in both] == [0, 0], output.read_text()

    found = trials(folder)
    done = [trial for trial in found if trial.state.name in ("COMPLETE", "PRUNED")]
    assert len(done) >= TRIALS and {trial.state.name for trial in found} <= {"COMPLETE", "PRUNED", "FAIL"}
    killed, again = (trial for trial in found if trial.user_attrs["run"] == "trial-001")
    assert (killed.number, killed.state.name) == (1, "FAIL")
    assert again.params == killed.params and again.state.name in ("COMPLETE", "PRUNED")
    assert events(folder / "trial-001", "resumed")
    for trial in done:
        run = folder / trial.user_attrs["run"]
        if trial.state.name == "COMPLETE":
            assert trial.value == json.loads((run / "result.json").read_text())["best_value"]
        else:
            (line,) = events(run, "interrupted")[-1:]
            assert line["reason"] == "the observer Pruning" and not (run / "result.json").exists()
    assert "best: trial-" in output.read_text()


def test_a_signal_leaves_a_trial_that_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="optuna is not installed (pip install optuna)")
    folder, output = tmp_path / "sweep", tmp_path / "output"
    stopped = worker(folder, output, trials=1)
    deadline = time.monotonic() + 200
    while not list(folder.glob("trial-000/checkpoints/update-*")) and time.monotonic() < deadline:
        assert stopped.poll() is None, output.read_text()
        time.sleep(0.02)
    stopped.send_signal(signal.SIGTERM)
    stopped.wait(timeout=60)
    first, waiting = trials(folder)
    assert (first.state.name, waiting.state.name) == ("FAIL", "WAITING")
    assert worker(folder, output, trials=1).wait(timeout=200) == 0, output.read_text()
    assert [trial.state.name for trial in trials(folder)] == ["FAIL", "COMPLETE"]
    assert events(folder / "trial-000", "resumed") and (folder / "trial-000" / "result.json").exists()
