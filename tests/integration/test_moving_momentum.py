"""A run whose momentum, rate of biases and EMA move in their own ways: killed, and on another number of processes."""

from __future__ import annotations

from pathlib import Path

import helpers
import pytest

from accel_train.checkpoint.directory import delete_checkpoint, list_updates

COMMON = "digits --data.train-limit 480 --epochs 3 --optim.name momentum --schedule.warmup-epochs 1 --bitwise true"
EMA = "--ema.enabled true --ema.decay 0.9 --ema.every-updates 3 --ema.after-epochs 1 --ema.scale-decay true"
YOLO = "--schedule.name cosine --schedule.per epoch --schedule.warmup-bias-lr 0.1 --schedule.warmup-momentum 0.5"
CYCLE = "--schedule.name one_cycle --schedule.cycle-momentum 0.8 --schedule.cooldown-epochs 0.5"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [YOLO, CYCLE])
def test_the_same_bits_after_a_kill_and_on_two_processes(schedule: str, tmp_path: Path) -> None:
    words = (*COMMON.split(), *EMA.split(), *schedule.split(), "--checkpoint.every-updates", "1")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ended = helpers.run(*words, "--output-dir", whole)
    assert ended.returncode == 0, ended.stderr
    with helpers.started(parts, *words, "--checkpoint.keep", "90") as started:
        started.until(lambda: (parts / "checkpoints/update-00000005").exists())
    for name in ("result.json", "model.safetensors", "ema.safetensors"):
        (parts / name).unlink(missing_ok=True)
    for update in list_updates(parts / "checkpoints"):
        if update > 5:  # in the warm-up
            delete_checkpoint(parts / "checkpoints", update)
    ended = helpers.run(*words, "--checkpoint.keep", "90", "--output-dir", parts, processes=2)
    assert ended.returncode == 0, ended.stderr
    for name in ("model.safetensors", "ema.safetensors"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes(), name
    other = tmp_path / "other"
    fewer = (
        " ".join(words)
        .replace("--schedule.warmup-momentum 0.5", "")
        .replace("--schedule.cycle-momentum 0.8", "")
        .split()
    )
    assert helpers.run(*fewer, "--output-dir", other).returncode == 0
    assert (other / "model.safetensors").read_bytes() != (whole / "model.safetensors").read_bytes()
