"""`accel-train bench`: its figures, its arithmetic, and its messages when it cannot measure. No test asserts a time."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import helpers
import pytest

from accel_train.cli import main
from accel_train.errors import UserError
from accel_train.tools.bench import Round, Spread, ratio, read_run, spread, temporary_folder


def bench(*words: object, processes: int = 1, **variables: str) -> subprocess.CompletedProcess[str]:
    return helpers.python("-m", "accel_train", "bench", *words, processes=processes, timeout=200, **variables)  # type: ignore[arg-type]


def check(figures: dict[str, Any], rounds: int) -> None:
    """Check the relations between the figures."""
    rates, ratios = figures["images_per_second"], figures["ratios"]
    assert figures["rounds"] == rounds
    for found in (*rates.values(), *ratios.values(), figures["update_seconds"]):
        assert len(found["rounds"]) == rounds
        assert 0 < found["low"] <= found["median"] <= found["high"]
    for name in ("trainer", "input"):
        pairs = zip(rates[name]["rounds"], rates["limit"]["rounds"], strict=True)
        assert ratios[f"{name}/limit"]["rounds"] == pytest.approx([above / below for above, below in pairs])
    seconds = [figures["batch_size"] / rate for rate in rates["trainer"]["rounds"]]
    assert figures["update_seconds"]["rounds"] == pytest.approx(seconds)
    assert all(0 <= share <= 1 for share in figures["shares"].values())
    assert set(figures["shares"]) == {
        "forward and backward", "optimizer", "data wait", "augmentation", "rest",
    }  # fmt: skip
    assert figures["save_seconds"] >= 0
    assert figures["batch_size"] == figures["processes"] * figures["accumulation"] * figures["micro_batch"]
    assert figures["environment"]["packages"]["torch"]


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.ci), pytest.param(2, marks=pytest.mark.slow)])
def test_digits_end_to_end(tmp_path: Path, processes: int) -> None:
    output = tmp_path / "figures.json"
    words = ("digits", "--rounds", 2, "--updates", 8, "--micro-batch-size", 24 // processes, "--output", output)
    done = bench(*words, processes=processes)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("All measurements") == 1
    figures = json.loads(output.read_text())
    check(figures, rounds=2)
    assert (figures["processes"], figures["accumulation"]) == (processes, 2)
    assert (figures["updates"], figures["warm_up_updates"]) == (8, 2)
    for text in ("limit (bare loop)", "input alone", "trainer", "forward and backward", "warm-up", str(output)):
        assert text in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]  # the runs are gone


def test_what_cannot_be_measured_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, messages in (
        ("mnist", ["unknown recipe 'mnist'", "mnist_cnn"]),
        ("digits --rounds 0", ["--rounds", "greater than 0"]),
        ("digits --updates 0", ["--updates", "greater than 0"]),
        ("digits --output-dir x", ["--output-dir", "--output"]),
        ("digits --round 2", ["--round", "Did you mean 'rounds'?"]),
        (f"digits --output {tmp_path}", ["is a folder"]),
    ):
        assert main(["bench", *words.split()]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert all(message in error for message in messages), error


def test_without_the_data_the_way_out_is_named() -> None:
    done = bench("imagenet_resnet50", "--data.root", "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "nowhere" in done.stderr and "--data.name synthetic" in done.stderr


def test_the_runs_need_a_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--output: .*file cannot be written"):
        temporary_folder(tmp_path / "file")


def test_shares_of_an_update() -> None:
    found = Round(100.0, 1000.0, 80.0, 0.05, 0.01, {"augmentation": 0.016, "optimizer": 0.04}).shares(64)
    assert found == pytest.approx({
        "forward and backward": 0.75, "optimizer": 0.05, "data wait": 0.05, "augmentation": 0.02, "rest": 0.13,
    })  # fmt: skip
    # The parts are measured at different times: none is below 0 or above 1.
    found = Round(50.0, 1000.0, 80.0, 0.9, 0.01, {"augmentation": 2.0, "optimizer": 1.3}).shares(64)
    assert found == {
        "forward and backward": 0.0, "optimizer": 1.0, "data wait": 0.9, "augmentation": 1.0, "rest": 0.0,
    }  # fmt: skip


def test_median_quartiles_and_ratios_within_a_round() -> None:
    assert spread([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(3.0, 2.0, 4.0, (5.0, 1.0, 4.0, 2.0, 3.0))
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0, (7.0,))
    assert ratio([10.0, 5.0, 1.0], [20.0, 10.0, 2.0]) == spread([0.5] * 3)  # a machine that slows down


def test_a_runs_own_lines_make_its_speed(tmp_path: Path) -> None:
    lines = [
        {"kind": "train", "update": 2, "seconds": 9.0, "images_per_second": 1.0, "data_wait_fraction": 1.0},
        {"kind": "train", "update": 4, "seconds": 1.0, "images_per_second": 96.0, "data_wait_fraction": 0.1},
        {"kind": "eval", "update": 4, "seconds": 7.0},
        {"kind": "checkpoint", "update": 4, "stalled_seconds": 1.0},
        {"kind": "train", "update": 6, "seconds": 3.0, "images_per_second": 32.0, "data_wait_fraction": 0.3},
        {"kind": "checkpoint", "update": 6, "stalled_seconds": 3.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(tmp_path, warm_up=2) == pytest.approx((48.0, 0.25, 2.0))
