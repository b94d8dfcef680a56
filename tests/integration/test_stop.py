"""Runs that end before their last epoch: patience, hours, and the metric that says what is best."""

from __future__ import annotations

import json
from pathlib import Path

import helpers
import pytest
from helpers import lines_of, result_of

from accel_train.checkpoint.directory import list_updates
from accel_train.cli import main

DIGITS = ("digits", "--data.val-fraction", "0.1", "--data.train-limit", "480", "--checkpoint.keep", "50")  # 10 updates
FLAT = (*DIGITS, "--optim.lr", "0", "--epochs", "30", "--best-metric", "loss", "--checkpoint.every-updates", "4")


@pytest.mark.slow
def test_without_progress_it_ends_after_the_patience_also_killed_and_on_two_processes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    patient = (*FLAT, "--stop.patience-epochs", "3")
    with helpers.started(run, *patient) as started:
        started.until(lambda: (run / "checkpoints/update-00000012").exists())
    helpers.go_back_to(12, run)  # so that it is always killed in its second epoch
    ended = helpers.run(*patient, "--output-dir", run, processes=2)
    assert ended.returncode == 0, ended.stderr
    assert "digits: 4 of 30 epochs, 40 updates" in ended.stdout
    assert "stopped by --stop.patience-epochs 3" in " ".join(ended.stdout.split())
    found = result_of(run)
    assert (found["stopped_by"], found["epochs"], found["updates"]) == ("patience", 4, 40)
    assert (found["best_metric"], found["best_update"], found["best_val_accuracy"]) == ("loss", 10, None)
    assert found["best_value"] == lines_of(run, "eval", "val")[0]["loss"]
    assert found["test_accuracy"] is not None and (run / "model.safetensors").exists()
    assert lines_of(run, "eval", "test")[-1]["epoch"] == 4
    assert json.loads((run / "status.json").read_text())["state"] == "finished"

    again = helpers.run(*patient, "--output-dir", run)
    assert again.returncode == 0 and "Nothing is left to do" in again.stdout
    more = (*FLAT, "--stop.patience-epochs", "4")
    refused = helpers.run(*more, "--output-dir", run)
    assert refused.returncode == 2 and "stop.patience-epochs: 3 -> 4. Give another --output-dir" in refused.stderr
    longer = tmp_path / "longer"
    assert helpers.run(*more, "--resume", run, "--output-dir", longer, "--allow-change", "stop").returncode == 0
    assert (result_of(longer)["epochs"], result_of(longer)["stopped_by"]) == (5, "patience")
    assert result_of(run) == found


@pytest.mark.ci
def test_the_hours_of_all_starts_count(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = (*DIGITS, "--epochs", "2000", "--checkpoint.every-epochs", "1", "--checkpoint.keep", "2")
    with helpers.started(run, *words) as started:
        started.until(lambda: (run / "checkpoints").exists() and len(list_updates(run / "checkpoints")) > 1)
    newest = max((run / "checkpoints").glob("update-*"))
    before = json.loads((newest / "state.json").read_text())["train"]
    assert before["wall_seconds"] > 0
    hours = (before["wall_seconds"] + 0.01) / 3600  # over at the end of the next epoch
    ended = helpers.run(*words, "--stop.hours", hours, "--output-dir", run, processes=2)
    assert ended.returncode == 0, ended.stderr
    found = result_of(run)
    assert (found["stopped_by"], found["epochs"]) == ("hours", before["epoch"] + 1)
    assert f"stopped by --stop.hours {hours:g}" in " ".join(ended.stdout.split())
    assert lines_of(run, "eval", "test")[-1]["epoch"] == found["epochs"]
    more = ("--stop.hours", hours * 1.0001, "--output-dir", run, "--allow-change", "stop.hours")
    helpers.unfinish(run)
    assert helpers.run(*words, *more).returncode == 0
    assert (result_of(run)["stopped_by"], result_of(run)["epochs"]) == ("hours", found["epochs"])  # it was over by then


@pytest.mark.ci
def test_the_best_is_that_of_the_metric_and_begins_anew_with_another_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [
        "train",
        *DIGITS,
        "--output-dir",
        str(run),
        "--schedule.name",
        "plateau",
        "--schedule.patience-epochs",
        "0",
    ]
    words += ["--schedule.warmup-epochs", "0", "--optim.lr", "0.3"]
    assert main([*words, "--epochs", "5", "--best-metric", "loss"]) == 0
    lines = lines_of(run, "eval", "val")
    best = min(lines, key=lambda line: line["loss"])
    assert (result_of(run)["best_update"], result_of(run)["best_value"]) == (best["update"], best["loss"])
    state = json.loads((max((run / "checkpoints").glob("update-*")) / "state.json").read_text())
    lowest, decays = float("inf"), 0
    for line in lines:
        decays += line["loss"] >= lowest
        lowest = min(lowest, line["loss"])
    assert state["schedule"]["decays"] == decays and state["schedule"]["best"] == -lowest

    helpers.unfinish(run)
    assert main([*words, "--epochs", "6", "--best-metric", "f1", "--allow-change", "epochs"]) == 2
    allowed = ["--allow-change", "epochs", "best-metric"]
    assert main([*words, "--epochs", "6", "--best-metric", "f1", *allowed]) == 0
    last = lines_of(run, "eval", "val")[-1]
    assert (result_of(run)["best_update"], result_of(run)["best_value"]) == (last["update"], last["f1"])
    assert result_of(run)["stopped_by"] == "epochs"
