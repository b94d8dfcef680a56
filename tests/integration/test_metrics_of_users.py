"""Metrics of a user's own in whole runs: on 1, 2 and 3 processes, killed, failing, and deciding what is best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import helpers
import pytest
from helpers import result_of
from sklearn.metrics import balanced_accuracy_score
from test_restart import assert_bitwise_equal, killed_and_restarted
from torch import Tensor

from accel_train.api import evaluate, train
from accel_train.errors import UserError

MINE = """
import torch
from sklearn.metrics import balanced_accuracy_score

def balanced(logits, targets):
    return balanced_accuracy_score(targets, logits.argmax(1))

def margin(logits, targets):
    best = logits.topk(2).values
    return (best[:, 0] - best[:, 1]).mean()

def entropy(logits, targets):
    return torch.nn.functional.cross_entropy(logits, targets)

entropy.higher_is_better = False
"""
NAMES = ("balanced", "margin", "entropy")
DIGITS = ("digits", "--data.val-fraction", "0.1", "--data.train-limit", "480", "--checkpoint.keep", "50")  # 10 updates


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def chosen(mine: Path) -> tuple[str, ...]:
    return ("--metrics", *(f"{mine}:{name}" for name in NAMES))


def evaluations(run: Path, split: str, weights: str = "model") -> list[dict[str, Any]]:
    return [line for line in helpers.lines_of(run, "eval", split) if line["weights"] == weights]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_figures_have_the_same_bits_on_1_2_and_3_processes_also_after_kills(mine: Path, tmp_path: Path) -> None:
    words = (*DIGITS, *chosen(mine), "--bitwise", "true", "--epochs", "3", "--ema.enabled", "true")
    words += ("--best-metric", "balanced", "--eval-batch-size", "50", "--checkpoint.every-updates", "4")
    runs = {processes: tmp_path / f"run{processes}" for processes in (1, 2, 3)}
    for processes, run in runs.items():
        done = helpers.run(*words, "--output-dir", run, processes=processes, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    killed_and_restarted(tmp_path / "killed", *words, processes=(2, 3, 1), kills=2, seed=1)
    assert_bitwise_equal(tmp_path / "killed", runs[1])
    for run in (runs[2], runs[3]):
        for split in ("val", "test"):
            for weights in ("model", "ema"):
                expected = [{name: line[name] for name in NAMES} for line in evaluations(runs[1], split, weights)]
                assert [{name: line[name] for name in NAMES} for line in evaluations(run, split, weights)] == expected
    run = runs[2]
    last, found = evaluations(run, "test")[-1], result_of(run)
    best = max(evaluations(run, "val", "ema"), key=lambda line: line["balanced"])
    assert (found["best_metric"], found["best_value"], found["best_update"]) == (
        "balanced", best["balanced"], best["update"],
    )  # fmt: skip
    assert {name: found[f"test_{name}"] for name in NAMES} == {name: last[name] for name in NAMES}
    assert f"balanced {last['balanced']:.4f}" in " ".join(done.stdout.split())
    assert abs(last["entropy"] - last["loss"]) < 1e-5  # of float32 sums

    # Evaluated afterwards, on another number of processes.
    for processes in (1, 3):
        again = helpers.python("-m", "accel_train", "evaluate", run, "--trust-code", "true", processes=processes)
        assert again.returncode == 0, again.stderr
        record = json.loads((run / "evaluation-test.json").read_text())["model"]
        assert {name: record[name] for name in NAMES} == {name: last[name] for name in NAMES}
    assert "entropy" in again.stdout
    kept = json.loads((run / "code.json").read_text())
    assert {*kept} == {"metrics:balanced", "metrics:margin", "metrics:entropy"}
    refused = helpers.python("-m", "accel_train", "evaluate", run)
    assert refused.returncode == 2
    assert f"if you trust that: accel-train evaluate {run} --trust-code true" in refused.stderr
    mine.unlink()
    trusted = helpers.python("-m", "accel_train", "evaluate", run, "--trust-code", "true")
    assert trusted.returncode == 0, trusted.stderr


FAILING = (
    MINE
    + """
calls = 0

def failing(logits, targets):
    global calls
    calls += 1
    if calls > 2:  # the trial, and the first epoch
        raise ValueError("no such digit")
    return calls
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_an_exception_ends_all_processes_with_its_line_and_nothing_is_lost(tmp_path: Path, processes: int) -> None:
    mine, run = tmp_path / "mine.py", tmp_path / "run"
    mine.write_text(FAILING)
    words = (*DIGITS, "--metrics", f"{mine}:failing", "--epochs", "3", "--checkpoint.every-epochs", "3")
    words += ("--checkpoint.keep", "9", "--output-dir", str(run))
    failed = helpers.run(*words, processes=processes)
    assert failed.returncode == 2
    text = failed.stdout + failed.stderr
    assert "--metrics mine.py:failing: ValueError: no such digit (mine.py, line " in text
    assert "in failing: `raise ValueError" in text
    assert "Saved: update 20 of 20; correct this, then: " in text
    assert text.count("ValueError: no such digit") == 1 and "Traceback" not in text
    assert (run / "checkpoints/update-00000020").exists()
    mine.write_text(FAILING.replace("calls > 2", "False"))
    done = helpers.run(*words, processes=3 - processes)
    assert done.returncode == 0, done.stderr
    assert "changed since the last start of this run" in done.stderr
    assert [line["epoch"] for line in evaluations(run, "val")] == [1, 2, 3]
    assert result_of(run)["updates"] == 30


@pytest.mark.slow
def test_the_patience_follows_it_over_starts_and_nan_is_never_best(tmp_path: Path) -> None:
    """The value is best after the second epoch; NaN in the first, and infinite in the third, count as no progress."""
    mine, run = tmp_path / "mine.py", tmp_path / "run"
    places = tmp_path / "count"
    mine.write_text(
        f"""
from pathlib import Path

def error(logits, targets):
    if len(targets) < 50:  # the trial
        return 1.0
    place = Path({str(places)!r})
    done = len(place.read_text()) if place.exists() else 0
    place.write_text("x" * (done + 1))
    return (float("nan"), 0.5, float("-inf"), 0.6, 0.5, 0.7, 0.8)[done]

error.higher_is_better = False
"""
    )
    words = (*DIGITS, "--metrics", f"{mine}:error", "--best-metric", "error", "--stop.patience-epochs", "4")
    words += ("--output-dir", str(run), "--epochs", "30", "--allow-change", "epochs")
    for epochs, processes in ((2, 1), (3, 2), (4, 1)):  # each one ends with a test, which has a value of its own
        done = helpers.run(*words, "--epochs", epochs, processes=processes)
        assert done.returncode == 0, done.stderr
        places.write_text("x" * epochs)
        helpers.unfinish(run)
    done = helpers.run(*words, processes=2)
    assert done.returncode == 0, done.stderr
    found = result_of(run)
    assert (found["stopped_by"], found["epochs"]) == ("patience", 6)
    assert (found["best_value"], found["best_update"], found["best_metric"]) == (0.5, 20, "error")
    assert [line["error"] for line in evaluations(run, "val")] == [None, 0.5, None, 0.6, 0.5, 0.7]
    assert "by --stop.patience-epochs 4\n" in done.stdout and "best val error  0.5000 after epoch 2;" in done.stdout


@pytest.mark.slow
def test_it_may_change_in_a_run_unless_it_decides_what_is_best(mine: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other.py"
    other.write_text(MINE)
    words = (*DIGITS, "--output-dir", str(run))
    assert helpers.run(*words, "--epochs", 1).returncode == 0
    best = ("--metrics", f"{mine}:margin", f"{mine}:balanced", "--best-metric", "balanced")
    helpers.unfinish(run)
    done = helpers.run(*words, "--epochs", 2, *best, "--allow-change", "epochs", "best-metric")
    assert done.returncode == 0, done.stderr
    assert "the best mine.py:balanced so far" not in done.stderr and "a new best is recorded" in done.stderr
    assert [line.keys() & {"margin", "balanced"} for line in evaluations(run, "val")] == [set(), {"margin", "balanced"}]
    assert result_of(run)["best_update"] == 20

    fewer = ("--metrics", f"{mine}:balanced", f"{mine}:margin", "--best-metric", "balanced")
    helpers.unfinish(run)
    done = helpers.run(*words, "--epochs", 3, *fewer, "--allow-change", "epochs")
    assert done.returncode == 0, done.stderr
    replaced = ("--metrics", f"{other}:balanced", "--best-metric", "balanced", "--epochs", 4)
    helpers.unfinish(run)
    refused = helpers.run(*words, *replaced, "--allow-change", "epochs")
    assert refused.returncode == 2
    assert "best-metric: mine.py:balanced -> other.py:balanced" in refused.stderr
    done = helpers.run(*words, *replaced, "--allow-change", "epochs", "best-metric")
    assert done.returncode == 0 and "a new best is recorded from here on" in done.stderr
    assert result_of(run)["best_update"] == 40


@pytest.mark.ci
@pytest.mark.usefixtures("fresh_accelerate")
def test_objects_of_python_are_metrics_by_their_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def balanced(logits: Tensor, targets: Tensor) -> float:
        return float(balanced_accuracy_score(targets, logits.argmax(1)))

    def hit(logits: Tensor, targets: Tensor) -> Tensor:
        return (logits.argmax(1) == targets).double().mean()

    run, given = tmp_path / "run", {"balanced": balanced, "hit": hit}
    settings: dict[str, Any] = {"output_dir": run, "best_metric": "balanced"}
    training = train(*DIGITS, epochs=1, metrics=given, **settings)
    trained = training.metrics
    assert trained["best_metric"] == "balanced" and trained["best_value"] == evaluations(run, "val")[-1]["balanced"]
    assert trained["test_hit"] == trained["test_accuracy"]
    for again in (evaluate(training), evaluate(run, metrics=given)):
        assert (again.last["balanced"], again.last["hit"]) == (trained["test_balanced"], trained["test_hit"])
    without = evaluate(run).last
    assert "balanced" not in without and without["accuracy"] == trained["test_accuracy"]
    assert "given as objects of Python are left out here: balanced, hit" in caplog.text

    helpers.unfinish(run)
    with pytest.raises(UserError, match="balanced"):  # it decides what is best, and is not there
        train(*DIGITS, epochs=2, **settings)
    longer = train(*DIGITS, "--allow-change", "epochs", epochs=2, metrics=given, **settings)
    assert [line["epoch"] for line in evaluations(run, "val")] == [1, 2] and longer.metrics["best_metric"] == "balanced"
    for name in ("top5_accuracy", "accuracy"):
        with pytest.raises(UserError, match=name):
            train(*DIGITS, metrics={name: balanced}, output_dir=tmp_path / "other")
