"""What whole runs learn, and what they say of it: the training script, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from safetensors.torch import load_file

from accel_train.cli import main

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def trained(run: Path, words: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of `accel-train train WORDS`."""
    assert main(["train", *words.split(), "--output-dir", str(run)]) == 0
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_plateau_counts_epochs_where_not_every_one_is_evaluated(tmp_path: Path) -> None:
    # A rate too small to move any prediction: 2 epochs after the first evaluation, more than 1, it decays.
    lines = trained(
        tmp_path,
        "digits --epochs 6 --data.train-limit 96 --data.val-fraction 0.1 --eval-every-epochs 2 --log-every-updates 1 "
        "--schedule.name plateau --schedule.patience-epochs 1 --optim.lr 1e-9",
    )
    rates = {line["epoch"]: line["lr"] for line in lines if line["kind"] == "train"}
    assert rates == pytest.approx({**dict.fromkeys([1, 2, 3, 4], 1e-9), **dict.fromkeys([5, 6], 1e-10)})


def test_the_step_has_the_norm_of_optim_clip(tmp_path: Path) -> None:
    trained(
        tmp_path,
        "digits --data.train-limit 96 --epochs 1 --checkpoint.every-updates 1 --optim.name momentum --optim.momentum 0 "
        "--optim.lr 2 --optim.weight-decay 0 --schedule.name constant --optim.clip 0.25",
    )
    before, after = (load_file(tmp_path / f"checkpoints/update-{n:08d}/model.safetensors") for n in (1, 2))
    steps = torch.cat([(after[name] - before[name]).flatten() for name in before])
    assert steps.norm().item() == pytest.approx(2 * 0.25, rel=1e-3)


TINY = (
    "digits --data.name synthetic --data.train-limit 48 --data.test-limit 16 --model.image-size 32 --batch-size 16 "
    "--epochs 1 --log-every-updates 1 --model.image-size 32"
)


@pytest.mark.ci
def test_gradient_checkpointing_leaves_the_same_weights_and_statistics(tmp_path: Path) -> None:
    # Without --model.dropout: this model calls it as a function, which cannot be redirected in the backward pass.
    net = "--model.name test_resnet --model.drop-path 0.5 --micro-batch-size 8 --virtual-batch-size 4"
    weights, losses = [], []
    for on in ("false", "true"):
        run = tmp_path / on
        lines = trained(run, f"{TINY} {net} --model.gradient-checkpointing {on}")
        losses.append([line["loss"] for line in lines if line["kind"] in ("train", "eval")])
        weights.append(load_file(run / "model.safetensors"))
        helpers.forget_accelerate()
    plain, again = weights
    assert losses[0] == losses[1]
    assert any("running_mean" in name for name in plain)
    assert [name for name in plain if not torch.equal(plain[name], again[name])] == []


def test_the_lines_of_a_run_name_epochs_and_rates_that_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        f"{TINY} --epochs 2 --data.val-fraction 0.25 --ema.enabled true --model.name test_vit "
        "--optim.name adamw --optim.lr 0.01 --optim.layer-decay 0.5 --schedule.name constant"
    )
    lines = trained(tmp_path, words)
    assert {line["lr"] for line in lines if line["kind"] == "train"} == {0.01}
    assert {line["epoch"] for line in lines if "epoch" in line} == {1, 2}
    tests = [(line["epoch"], line["weights"], line["loss"]) for line in lines if line.get("split") == "test"]
    assert [test[:2] for test in tests] == [(2, "model"), (2, "ema")]
    shown = capsys.readouterr().out
    assert "epoch 2/2  test   loss" in shown and "epoch 3" not in shown

    (tmp_path / "result.json").unlink()  # stopped within the final test: it is done once more, and written down once
    helpers.forget_accelerate()
    again = trained(tmp_path, words)
    assert [(line["epoch"], line["weights"], line["loss"]) for line in again if line.get("split") == "test"] == tests
    assert "epoch 3" not in capsys.readouterr().out


def test_fp16_on_a_cpu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert main(["train", "digits", "--output-dir", str(tmp_path / "run")]) == 2
    assert "fp16 was asked for, but Accelerate has none on a CPU: give --mixed_precision bf16 or no." in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.ci
@pytest.mark.parametrize("processes", [1, 2])
def test_a_long_path_of_temporary_files(tmp_path: Path, processes: int) -> None:
    """The path of a socket has at most 107 bytes; data workers are reached through sockets."""
    long = tmp_path / ("x" * max(1, 100 - len(str(tmp_path))))
    long.mkdir()
    words = ("digits", "--data.train-limit", 128, "--epochs", 1)
    words += ("--augment.train-interpolation", "random", "--data.workers", 1)
    done = helpers.run(*words, "--output-dir", tmp_path / "run", processes=processes, TMPDIR=str(long))
    assert done.returncode == 0, done.stderr
