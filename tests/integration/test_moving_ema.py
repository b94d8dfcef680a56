"""A run whose learning rate and EMA move in their own ways: killed, and on another number of processes."""

from __future__ import annotations

from pathlib import Path

import helpers
import pytest

from accel_train.checkpoint.directory import delete_checkpoint, list_updates

COMMON = "digits --data.train-limit 480 --epochs 3 --optim.name momentum --schedule.warmup-epochs 1 --bitwise true"
EMA = "--ema.enabled true --ema.decay 0.9 --ema.every-updates 3 --ema.after-epochs 1 --ema.scale-decay true"
OWN = """
def factor(epoch, epochs):
    return 0.1 ** (epoch // 1.5) if epoch < epochs - 0.5 else 0.01
"""
SCHEDULES = ("--schedule.name {}/mine.py:factor --schedule.per epoch", "--schedule.name one_cycle")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_same_bits_after_a_kill_and_on_two_processes(schedule: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    words = (*COMMON.split(), *EMA.split(), *schedule.format(tmp_path).split(), "--checkpoint.every-updates", "1")
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
    words = (*words, "--schedule.name", "constant", "--ema.scale-decay", "false", "--output-dir", tmp_path / "other")
    ended = helpers.run(*words)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "other/model.safetensors").read_bytes() != (whole / "model.safetensors").read_bytes()
