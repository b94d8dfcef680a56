"""Options that are settings of parameter groups: a run that goes on with another value has it, not the checkpoint's."""

from __future__ import annotations

import shutil
from pathlib import Path

import helpers
import pytest
import torch
from safetensors.torch import load_file

from accel_train.cli import main

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

BASE = (
    "digits --schedule.name constant --data.name synthetic --data.train-limit 32 --data.test-limit 16 "
    "--model.image-size 8 --batch-size 16 --model.name test_resnet --optim.weight-decay 0.1 --optim.lr 0.05 "
    "--optim.head-lr 0.1 --optim.norm-weight-decay 0.1"
)


def weights_after(run: Path, words: str) -> dict[str, torch.Tensor]:
    assert main(["train", *f"{BASE} {words}".split(), "--output-dir", str(run)]) == 0
    return load_file(run / "model.safetensors")


@pytest.mark.ci
def test_the_new_value_counts(tmp_path: Path) -> None:
    first = weights_after(tmp_path / "first", "--epochs 1")
    shutil.copytree(helpers.unfinish(tmp_path / "first"), tmp_path / "same")
    same = weights_after(tmp_path / "same", "--epochs 2 --allow-change epochs")
    for option, value, concerns in (
        ("optim.norm-weight-decay", "9", "bn1.weight"),
        ("optim.head-lr", "0", "fc.weight"),
    ):
        run = shutil.copytree(tmp_path / "first", tmp_path / option)
        other = weights_after(run, f"--epochs 2 --allow-change epochs {option} --{option} {value}")
        assert not torch.equal(same[concerns], first[concerns])
        assert not torch.allclose(other[concerns], same[concerns], rtol=1e-4, atol=1e-6), option
    assert torch.equal(other["fc.weight"], first["fc.weight"])  # the last one: a rate of 0
