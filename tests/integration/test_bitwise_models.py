"""`--bitwise true` with models of a user's own that are unlike those of the libraries."""

from __future__ import annotations

from pathlib import Path

import helpers
import pytest
from test_bitwise import trained

# The last window of an epoch has padding: of its virtual batches of 6 samples some have none, one has some, and the
# others have nothing else.
WORDS = (
    "digits --schedule.name constant --data.train-limit 75 --data.test-limit 30 --data.val-fraction 0 "
    "--virtual-batch-size 6"
)
CODE = """
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Types(nn.Module):
    \"\"\"Parameters of three types, two of them with sparse gradients.\"\"\"

    def __init__(self, num_classes):
        super().__init__()
        self.words = nn.Embedding(17, 8, sparse=True)
        self.more_words = nn.Parameter(torch.randn(17, 8, dtype=torch.float64) / 8)
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)
        self.head = nn.Linear(8, num_classes, dtype=torch.bfloat16)

    def forward(self, images):
        numbers = (images.flatten(1).clamp(0, 1) * 16).long()
        x = self.words(numbers) * F.embedding(numbers, self.more_words, sparse=True)
        return self.head(self.norm(x.mean(1)).to(torch.bfloat16)).float()


class Draws(nn.Module):
    \"\"\"All that draws: in a layer of torch's, of torch's C++, and from the generators of three libraries.\"\"\"

    def __init__(self, num_classes):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=False)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.recurrent = nn.LSTM(8, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.relu, self.drop = nn.RReLU(), nn.Dropout(0.2)
        self.head = nn.Linear(8, num_classes)

    def forward(self, images):
        x = self.encoder(images.flatten(1, 2).transpose(0, 1)).transpose(0, 1)
        x = self.drop(self.relu(self.recurrent(x)[0][:, -1]))
        if self.training:
            x = x + 0.1 * torch.rand_like(x) + 0.1 * F.gumbel_softmax(x, hard=True)
            x = x * random.uniform(0.9, 1.1) + 0.1 * torch.from_numpy(np.random.rand(8)).float()
        return self.head(x)
"""


def named(folder: Path, name: str) -> str:
    (folder / "mine.py").write_text(CODE)
    return f"{WORDS} --model.name {folder / 'mine.py'}:{name}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Draws", "Types"])
def test_a_run_continues_on_another_number_of_processes(name: str, tmp_path: Path) -> None:
    """What a model draws, and how its weights are rounded and averaged, follows from the update: not from the updates
    that a process has computed before. Weights in bfloat16 have no EMA."""
    averages = name == "Draws"
    words = f"{named(tmp_path, name)} --ema.enabled {averages}"
    trained(tmp_path / "whole", f"{words} --epochs 2", 1)
    trained(tmp_path / "parts", f"{words} --epochs 1", 1)
    helpers.unfinish(tmp_path / "parts")
    options = ("--bitwise", "true", "--data.workers", "0", "--allow-change", "epochs")
    done = helpers.run(*words.split(), "--epochs", 2, *options, "--output-dir", tmp_path / "parts", processes=4)
    assert done.returncode == 0 and "continuing after update" in done.stdout, done.stderr
    for weights in ("model.safetensors", *["ema.safetensors"] * averages):
        assert (tmp_path / "whole" / weights).read_bytes() == (tmp_path / "parts" / weights).read_bytes(), weights
