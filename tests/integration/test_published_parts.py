"""Parts of published recipes in real runs: the same bits on another number of processes, after a kill in between."""

from __future__ import annotations

from pathlib import Path

import helpers
import pytest
from test_bitwise import assert_same, photographs

WORDS = """
digits --epochs 2 --data.train-limit 600 --batch-size 48 --virtual-batch-size 12 --bitwise true --log-every-updates 1
--checkpoint.every-updates 2 --checkpoint.keep 50
""".split()  # noqa: SIM905
OWN = """
from torchvision.transforms import v2
augment = v2.Compose([
    v2.RandomAffine(15, shear=9, fill=20), v2.RandomPerspective(0.3), v2.RandomApply([v2.GaussianBlur(5)]),
    v2.RandomAdjustSharpness(3, p=0.5), v2.ColorJitter(0.4),
])

def factor(epoch, epochs):
    return 0.1 ** (epoch // 1.5) if epoch < epochs - 0.5 else 0.01
"""
PARTS = {
    "mixing": "--augment.mixup 0.8 --augment.cutmix 1 --augment.mix-mode batch "
    "--loss.name bce --loss.bce-target-threshold 0.2 --optim.lr 0.01",
    "elem": "--augment.mixup 0.8 --augment.cutmix 1 --augment.mix-mode elem --data.repeats 3",
    "repeats": "--data.repeats 3 --augment.flip 0.5 --augment.mixup 0.2 --model.name mnist_cnn --model.image-size 28 "
    "--model.dropout 0.2",
    "policy": "--data.workers 1 --augment.policy rand-m9-n2-mstd0.5-inc1 --augment.erase 0.5 "
    "--augment.erase-mode pixel",
    "own": "--model.name mnist_cnn --batch-size 24 --model.image-size 28 --augment.crop resized "
    "--augment.train-interpolation random --augment.policy 3a --augment.erase 0.3 "
    "--augment.erase-mode rand --data.repeats 2",
    # A learning rate and an EMA that move in their own ways; the kill is in the warm-up.
    "own schedule": "--epochs 3 --optim.name momentum --schedule.warmup-epochs 1 --schedule.name mine.py:factor "
    "--schedule.per epoch --ema.enabled true --ema.decay 0.9 --ema.every-updates 3 --ema.after-epochs 1 "
    "--ema.scale-decay true",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_killed_and_resumed_on_two_processes_it_has_the_same_bits(name: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(OWN)
    words = [*WORDS, *PARTS[name].replace("mine.py", str(mine)).split()]
    if name == "own":
        folder = photographs(tmp_path / "photographs")
        words += ["--data.name", "folder", "--data.root", str(folder), "--data.train-limit", "none"]
        words += ["--augment.own", f"{mine}:augment"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    done = helpers.run(*words, "--output-dir", whole, timeout=300)
    assert done.returncode == 0, done.stderr
    with helpers.started(run, *words) as started:
        started.until(lambda: (run / "checkpoints/update-00000002").exists(), timeout=200)
    helpers.go_back_to(2, run)  # so that it is always in the middle of the first epoch
    resumed = helpers.run(*words, "--output-dir", run, processes=2, timeout=300)
    assert resumed.returncode == 0, resumed.stderr
    assert "continuing after update" in resumed.stdout and "in epoch 1" in resumed.stdout
    assert_same(whole, run)
    if "--ema.enabled" in words:
        assert (whole / "ema.safetensors").read_bytes() == (run / "ema.safetensors").read_bytes()
    if name == "repeats":
        assert [line["count"] for line in helpers.lines_of(whole, "eval", "train")] == [512, 512]
