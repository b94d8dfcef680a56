"""--data.sampler in real runs: the same draws on any number of processes, after a kill, and in what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

import helpers
import pytest

from accel_train.cli import main

DATA = '''
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Subset, TensorDataset

def data():
    """The digits, few of them a 7."""
    digits = load_digits()
    labels = torch.tensor(digits.target)
    dataset = TensorDataset(torch.tensor(digits.images * 15.9375, dtype=torch.uint8)[:, None], labels)
    dataset.classes, dataset.targets = range(10), labels
    few = (labels == 7).nonzero()[20:, 0].tolist()
    ids = [id for id in range(600) if id not in few]
    return {"train": Subset(dataset, ids), "test": Subset(dataset, list(range(1600, 1797)))}
'''
WORDS = """
digits --epochs 2 --model.name mnist_cnn --model.image-size 28 --model.dropout 0.2 --batch-size 48
--virtual-batch-size 12 --bitwise true
--augment.crop random --augment.pad 1 --log-every-updates 1 --data.workers 0
""".split()  # noqa: SIM905


@pytest.mark.slow
def test_killed_and_resumed_on_two_processes_it_draws_the_same(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(DATA)
    whole, run = tmp_path / "whole", tmp_path / "run"
    words = (*WORDS, "--data.name", f"{file}:data", "--data.sampler", "balanced", "--checkpoint.every-updates", 2)
    words += ("--checkpoint.keep", 50)
    done = helpers.run(*words, "--output-dir", whole)
    assert done.returncode == 0, done.stderr
    train = json.loads((whole / "result.json").read_text())["train_images"]

    with helpers.started(run, *words) as started:
        started.until(lambda: (run / "checkpoints/update-00000006").exists())
    helpers.go_back_to(8, run)  # of the 12 of the first epoch: so that it is always in its middle
    resumed = helpers.run(*words, "--output-dir", run, processes=2)
    assert resumed.returncode == 0, resumed.stderr
    assert "continuing after update" in resumed.stdout and "in epoch 1" in resumed.stdout
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    for folder in (whole, run):
        assert [line["count"] for line in helpers.lines_of(folder, "eval", "train")] == [train, train]
        newest = max((folder / "checkpoints").glob("update-*")) / "state.json"
        assert json.loads(newest.read_text())["train"]["samples_seen"] == 2 * train

    # Other draws within an epoch would not be the ones with which it began: only between epochs, and if allowed.
    other = helpers.run(*words, "--data.sampler", "shuffle", "--epochs", 3, "--output-dir", run)
    assert other.returncode == 2 and "data.sampler: balanced -> shuffle" in other.stderr
    assert len(other.stderr.splitlines()) == 1
    words = (*words, "--data.sampler", "shuffle", "--epochs", 3, "--allow-change", "data.sampler", "epochs")
    assert helpers.run(*words, "--output-dir", helpers.unfinish(run)).returncode == 0


LOSS = """
import torch.nn.functional as F

def loss(logits, targets):
    assert len(logits.unique(dim=0)) == len(logits), "one mask for two draws of a sample"
    return F.cross_entropy(logits, targets, reduction="none")
"""


@pytest.mark.slow
def test_two_draws_of_a_sample_in_one_update_have_two_dropout_masks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DATA.replace("[20:, 0]", "[1:, 0]") + LOSS)
    words = "digits --epochs 1 --model.name mnist_cnn --model.image-size 28 --model.dropout 0.5"
    words += f" --data.name {tmp_path}/mine.py:data --loss.name {tmp_path}/mine.py:loss --data.sampler balanced"
    assert main(["train", *words.split(), "--data.workers", "0", "--output-dir", str(tmp_path / "run")]) == 0


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DATA.replace("range(10), labels", "range(10), torch.eye(10)[labels]"))
    words = ("digits", "--data.name", f"{tmp_path}/mine.py:data", "--loss.name", "bce", "--data.sampler", "balanced")
    several = helpers.run(*words, "--output-dir", tmp_path / "run", processes=2)
    assert several.returncode == 2 and several.stderr.count("expects one label for each image") == 1
