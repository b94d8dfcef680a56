"""Checkpoints of older versions, where the same configuration meant something else, and of other machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hostile import edit_state
from torch import nn

from accel_train.cli import main
from accel_train.config.schema import Optim
from accel_train.optim.optimizer import create_optimizer

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

TINY = (
    "digits --data.name synthetic --data.train-limit 48 --data.test-limit 16 --model.image-size 32 --batch-size 16 "
    "--log-every-updates 1"
)
BATCHNORM = f"{TINY} --model.name test_resnet --virtual-batch-size 8"


def train(run: Path, words: str) -> int:
    return main(["train", *words.split(), "--output-dir", str(run)])


def interrupted(run: Path, words: str, **state: Any) -> None:
    """A run of one epoch whose checkpoints are changed and which is not finished."""
    assert train(run, f"{words} --epochs 1") == 0
    (run / "result.json").unlink()
    for checkpoint in sorted((run / "checkpoints").iterdir()):
        edit_state(checkpoint, lambda values: values.update(state))


def more(words: str) -> str:
    return f"{words} --epochs 2 --allow-change epochs"


def test_an_older_run_with_batchnorm_needs_permission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    interrupted(run, BATCHNORM, semantics=2)
    assert train(run, more(BATCHNORM)) == 2
    assert "virtual-batch-size: each process's micro-batch -> 8" in capsys.readouterr().err
    assert train(run, f"{more(BATCHNORM)} virtual-batch-size") == 0
    assert json.loads((run / "result.json").read_text())["updates"] == 6


def test_an_older_run_without_batchnorm_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    interrupted(run, TINY, semantics=2)
    assert train(run, more(TINY)) == 0


@pytest.mark.ci
@pytest.mark.parametrize(("policy", "goes_on"), [("randaugment", False), ("augmix", True), ("none", True)])
def test_an_older_run_whose_policy_did_not_interpolate_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str, goes_on: bool
) -> None:
    run, words = tmp_path / "run", f"{TINY} --augment.policy {policy} --data.workers 0"
    interrupted(run, words, semantics=5)
    assert train(run, more(words)) == (0 if goes_on else 2)
    if not goes_on:
        (line,) = capsys.readouterr().err.splitlines()
        assert "an older accel-train, where --augment.policy randaugment did not use --augment.interpolation" in line
        assert train(run, f"{more(words).replace('randaugment', 'none')} augment.policy") == 0


@pytest.mark.ci
def test_an_older_run_keeps_the_weight_decay_that_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--optim.decay-all left out what the model excludes; a checkpoint has the decay of each group."""
    words = f"{TINY} --model.image-size 160 --model.name test_vit --optim.name adamw --optim.weight-decay 0.1"
    words += " --optim.decay-all true"

    def older(optim: Optim, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        optimizer = create_optimizer(optim, model, **options)
        optimizer.param_groups[0]["weight_decay"] = 0.0
        return optimizer

    with monkeypatch.context() as patch:
        patch.setattr("accel_train.training_setup.create_optimizer", older)
        interrupted(tmp_path / "run", words, semantics=5)
    assert train(tmp_path / "run", more(words)) == 0
    (last,) = (tmp_path / "run" / "checkpoints").glob("update-00000006")
    groups = torch.load(last / "optimizer.pt", weights_only=True)["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.0, 0.1]


@pytest.mark.ci
def test_a_bitwise_run_says_what_its_bits_depend_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, words = tmp_path / "run", f"{TINY} --bitwise true"
    interrupted(run, words)
    state = run / "checkpoints" / "update-00000003" / "state.json"
    bits = json.loads(state.read_text())["bits"]
    assert bits["device"] == "cpu"
    assert bits["precision"] == "fp32"
    assert int(bits["threads of a process"]) >= 1
    edit_state(state.parent, lambda values: values["bits"].update({"threads of a process": "3"}))
    assert train(run, more(words)) == 0
    now = bits["threads of a process"]
    assert f"threads of a process 3 -> {now}: from here on the bits may be others" in capsys.readouterr().err


def test_bits_that_are_no_table_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, words = tmp_path / "run", f"{TINY} --bitwise true"
    interrupted(run, words, bits="some")
    assert train(run, more(words)) == 2
    assert "bits is 'some'" in capsys.readouterr().err
