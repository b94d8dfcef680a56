"""Runs that end, and are evaluated, within an epoch: a part of an epoch, --stop.updates, --eval-every-updates."""

from __future__ import annotations

import shutil
from pathlib import Path

import helpers
import pytest
from helpers import go_back_to, lines_of, result_of

from accel_train.checkpoint.directory import list_updates

# 10 updates an epoch; the last one has 30 samples of 48.
DIGITS = ("digits", "--data.val-fraction", "0.1", "--data.train-limit", "462", "--checkpoint.keep", "90")
SLOW = ("--checkpoint.every-updates", "1")


def evaluations(run: Path, split: str) -> list[tuple[int, int, int]]:
    return [(line["update"], line["epoch"], line["count"]) for line in lines_of(run, "eval") if line["split"] == split]


def trained(run: Path, *words: object, processes: int = 1) -> Path:
    ended = helpers.run(*DIGITS, *words, "--output-dir", run, processes=processes)
    assert ended.returncode == 0, ended.stderr
    return run


def killed_after(run: Path, update: int, *words: object) -> Path:
    """Return the folder of a run that was killed after the checkpoint of `update`."""
    with helpers.started(run, *DIGITS, *words, *SLOW) as started:
        started.until(lambda: (run / f"checkpoints/update-{update:08d}").exists())
    go_back_to(update, run)
    return run


@pytest.mark.slow
def test_a_run_ends_within_an_epoch_also_killed_and_on_two_processes(tmp_path: Path) -> None:
    words = ("--epochs", "2.5", "--bitwise", "true")
    whole = trained(tmp_path / "whole", *words)
    assert evaluations(whole, "train") == [(10, 1, 462), (20, 2, 462), (25, 3, 240)]
    assert [each[:2] for each in evaluations(whole, "val")] == [(10, 1), (20, 2), (25, 3)]
    found = result_of(whole)
    assert (found["epochs"], found["updates"], found["stopped_by"]) == (2.5, 25, "epochs")
    # The figures of the part are those of its samples: the sum of its updates' lines.
    (only,) = [line for line in lines_of(whole, "train") if line["update"] == 25]
    (last,) = [line for line in lines_of(whole, "eval") if line["split"] == "train" and line["update"] == 25]
    assert only["loss"] == pytest.approx(last["loss"]) and only["accuracy"] == pytest.approx(last["accuracy"])

    parts = killed_after(tmp_path / "parts", 23, *words)
    trained(parts, *words, *SLOW, processes=2)
    assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert evaluations(parts, "train") == evaluations(whole, "train")
    again = helpers.run(*DIGITS, *words, "--output-dir", whole)
    assert again.returncode == 0 and "Nothing is left to do" in again.stdout


@pytest.mark.ci
def test_a_longer_end_completes_the_epoch(tmp_path: Path) -> None:
    words = ("--schedule.name", "constant", "--schedule.warmup-epochs", "0")
    at_once = trained(tmp_path / "at once", *words, "--epochs", "2")
    run = trained(tmp_path / "run", *words, "--epochs", "0.5")
    assert (result_of(run)["epochs"], result_of(run)["updates"]) == (0.5, 5)
    trained(helpers.unfinish(run), *words, "--epochs", "2", "--allow-change", "epochs")
    assert result_of(run)["epochs"] == 2
    assert evaluations(run, "train") == [(5, 1, 240), (10, 1, 462), (20, 2, 462)]
    assert (run / "model.safetensors").read_bytes() == (at_once / "model.safetensors").read_bytes()


@pytest.mark.ci
def test_the_schedule_falls_until_the_last_update(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "--epochs", "9", "--stop.updates", "20", "--log-every-updates", "1")
    epochs = trained(tmp_path / "epochs", "--epochs", "2", "--log-every-updates", "1")
    assert [line["lr"] for line in lines_of(run, "train")] == [line["lr"] for line in lines_of(epochs, "train")]
    found = result_of(run)
    assert (found["epochs"], found["updates"], found["stopped_by"]) == (2, 20, "updates")
    assert (run / "model.safetensors").read_bytes() == (epochs / "model.safetensors").read_bytes()
    helpers.unfinish(run)
    words = ("--epochs", "9", "--stop.updates", "15", "--allow-change", "stop", "--output-dir", run)
    refused = helpers.run(*DIGITS, *words)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert "--stop.updates 15: 20 updates are done in" in refused.stderr and "Give a later end" in refused.stderr


@pytest.mark.slow
def test_evaluations_within_epochs_are_repeated_by_no_start_and_left_out_by_none(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", "--epochs", "2")
    words = ("--epochs", "2", "--eval-every-updates", "4")
    whole = trained(tmp_path / "whole", *words)
    expected = [4, 8, 10, 12, 16, 20]  # and the ends of epochs, once
    assert [each[0] for each in evaluations(whole, "val")] == expected
    assert [each[1] for each in evaluations(whole, "val")] == [1, 1, 1, 2, 2, 2]
    assert (whole / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    best = max(lines_of(whole, "eval"), key=lambda line: (line["split"] == "val", line["accuracy"], -line["update"]))
    assert (result_of(whole)["best_update"], result_of(whole)["best_value"]) == (best["update"], best["accuracy"])
    assert best["update"] in list_updates(whole / "checkpoints")

    run = killed_after(tmp_path / "run", 9, *words)
    for update in (4, 8, 9):  # killed after the evaluation and its save
        copy = tmp_path / f"after {update}"
        shutil.copytree(run, copy)
        go_back_to(update, copy)
        trained(copy, *words, *SLOW, processes=2 if update == 8 else 1)
        assert [each[0] for each in evaluations(copy, "val")] == expected
    # Stopped before an evaluation that was due: the next start makes it first, and only once.
    owing = tmp_path / "owing"
    shutil.copytree(killed_after(tmp_path / "other", 8, "--epochs", "2"), owing)
    trained(owing, *words)
    assert [each[0] for each in evaluations(owing, "val")] == expected[1:]
