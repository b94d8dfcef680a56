"""`accel-train bench`: its figures, its arithmetic, and its messages when it cannot measure. No test asserts a time."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import helpers
import pytest
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from accel_train.bench.bench import Round, figures_of, read_run, shortened, temporary_folder, with_synthetic_data
from accel_train.cli import main
from accel_train.cli.of_recipe.bench import print_figures
from accel_train.config.options import parse
from accel_train.data.order.plan import Plan
from accel_train.errors import UserError


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
        "forward and backward", "optimizer", "data wait", "augmentation", "metrics and guard", "checkpoint stall",
        "rest",
    }  # fmt: skip
    assert figures["batch_size"] == figures["processes"] * figures["accumulation"] * figures["micro_batch"]
    assert figures["environment"]["packages"]["torch"]


@pytest.mark.ci
def test_digits_end_to_end_with_accumulation(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    done = bench("digits", "--rounds", 2, "--updates", 8, "--micro-batch-size", 24, "--output", output)
    assert done.returncode == 0, done.stderr
    figures = json.loads(output.read_text())
    check(figures, rounds=2)
    assert (figures["accumulation"], figures["micro_batch"], figures["synthetic"]) == (2, 24, False)
    assert (figures["updates"], figures["warm_up_updates"]) == (8, 2)
    for text in ("limit (bare loop)", "input alone", "trainer", "warm-up", str(output)):
        assert text in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]  # the runs are gone


@pytest.mark.slow
def test_two_processes_train_several_times(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    done = bench("digits", "--rounds", 2, "--updates", 40, "--output", output, processes=2)
    assert done.returncode == 0, done.stderr
    figures = json.loads(output.read_text())
    check(figures, rounds=2)
    assert (figures["processes"], figures["micro_batch"]) == (2, 24)
    assert done.stdout.count("All figures") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


@pytest.mark.ci
def test_synthetic_images_in_place_of_a_set_that_is_not_there(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    done = bench("mnist_cnn", "--synthetic", "--data.root", tmp_path / "no", "--rounds", 1, "--updates", 2,
                 "--output", output)  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(output.read_text())
    check(figures, rounds=1)
    assert figures["synthetic"] and figures["batch_size"] == 64


def test_what_cannot_be_measured_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, messages in (
        ("mnist", ["unknown recipe 'mnist'", "mnist_cnn"]),
        ("digits --rounds 0", ["--rounds", "at least 1"]),
        ("digits --updates 0", ["--updates", "at least 1"]),
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
    assert "nowhere" in done.stderr and "--synthetic" in done.stderr


def test_the_runs_need_a_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--output: .*file cannot be written"):
        temporary_folder(tmp_path / "file")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert "--synthetic" in capsys.readouterr().out


positive = st.floats(1e-3, 1e6)
share = st.floats(0, 1)


@given(positive, positive, share, share, positive, positive, positive)
def test_shares_lie_between_0_and_1(
    limit: float, rate: float, wait: float, stall: float, augmentation: float, metrics: float, optimizer: float
) -> None:
    pieces = {"augmentation": augmentation, "metrics": metrics, "optimizer": optimizer}
    found = Round(limit, 1.0, rate, wait, stall, pieces).shares(64)
    assert all(0 <= each <= 1 for each in found.values())
    assert found["rest"] == 0 or sum(found.values()) == pytest.approx(1)


def test_shares_of_an_update() -> None:
    pieces = {"augmentation": 0.016, "metrics": 0.008, "optimizer": 0.04}
    found = Round(100.0, 1000.0, 80.0, 0.05, 0.01, pieces).shares(64)
    assert found == pytest.approx({
        "forward and backward": 0.75, "optimizer": 0.05, "data wait": 0.05, "augmentation": 0.02,
        "metrics and guard": 0.01, "checkpoint stall": 0.01, "rest": 0.11,
    })  # fmt: skip


def test_the_table_says_how_near_the_limit_is(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = {"augmentation": 0.016, "metrics": 0.008, "optimizer": 0.04}
    measured = [Round(160.0, 1000.0, 80.0, 0.05, 0.01, pieces)]
    figures = figures_of(parse(["digits"]), Accelerator(cpu=True), Plan(480, 48, 1, 1), measured)
    assert figures["ratios"]["trainer/limit"]["median"] == 0.5
    print_figures({**figures, "synthetic": False, "updates": 1, "warm_up_updates": 1})
    trainer = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("trainer"))
    assert "50.0%" in trainer


def test_a_runs_own_lines_make_its_speed(tmp_path: Path) -> None:
    config = parse(["digits", "--checkpoint.every-epochs", "2"])
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, every_seconds=0.0))
    plan = Plan(480, 48, 1, 1)  # 10 updates an epoch, a checkpoint every 20
    lines = [
        {"kind": "train", "update": 2, "seconds": 9.0, "images_per_second": 1.0, "data_wait_fraction": 1.0},
        {"kind": "train", "update": 4, "seconds": 1.0, "images_per_second": 96.0, "data_wait_fraction": 0.1},
        {"kind": "eval", "update": 4, "seconds": 7.0},
        {"kind": "checkpoint", "update": 4, "stalled_seconds": 1.0},
        {"kind": "train", "update": 6, "seconds": 3.0, "images_per_second": 32.0, "data_wait_fraction": 0.3},
        {"kind": "checkpoint", "update": 6, "stalled_seconds": 3.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    # 4 updates of 48 images take 4 s, 1 s waiting; a checkpoint stalls for 2 s, which is 0.1 s an update.
    assert read_run(tmp_path, config, plan, warm_up=2) == pytest.approx((48 / 1.1, 0.25 / 1.1, 0.1 / 1.1))
    often = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, every_updates=1))
    assert read_run(tmp_path, often, plan, warm_up=2) == pytest.approx((48 / 3, 0.25 / 3, 2 / 3))
    timed = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, every_seconds=3.5))
    assert read_run(tmp_path, timed, plan, warm_up=2) == pytest.approx((48 / 1.5, 0.25 / 1.5, 0.5 / 1.5))


def test_a_short_run_is_a_part_of_an_epoch_or_several_small_ones() -> None:
    config = parse(["digits", "--schedule.warmup-epochs", "2", "--checkpoint.every-updates", "3"])
    part = shortened(config, Plan(1438, 48, 1, 1), 10, 2)
    assert (part.epochs, part.data.train_limit, part.log_every_updates) == (1, 480, 2)
    assert part.schedule.warmup_epochs == 2 * 30 / 10  # 60 updates, as before
    assert part.checkpoint.every_updates is None and part.checkpoint.every_seconds == 0
    several = shortened(config, Plan(1438, 48, 1, 1), 100, 2)
    assert (several.epochs, several.data.train_limit) == (4, None)
    assert several.schedule == config.schedule


def test_synthetic_data_have_the_shapes_of_the_recipe() -> None:
    def shape(*words: str) -> tuple[Any, ...]:
        config = with_synthetic_data(parse([*words]))
        return config.data.name, config.data.channels, config.model.image_size, config.data.train_limit

    assert shape("mnist_cnn") == ("synthetic", 1, 28, 60_000)
    assert shape("cifar10_resnet18") == ("synthetic", 3, 32, 50_000)
    assert shape("imagenet_resnet50") == ("synthetic", 3, 224, 2048)
    assert shape("imagenet_resnet50", "--batch-size", "2048")[-1] == 4096
    assert shape("digits")[0] == "digits"
