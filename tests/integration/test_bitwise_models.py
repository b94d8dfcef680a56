"""`--bitwise true` with models of a user's own that are unlike those of the libraries."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_bitwise import assert_same, trained

# The last window of the epoch has 30 real samples and 18 of padding: a virtual batch of 6 has none of them or some.
WORDS = "digits --epochs 1 --data.train-limit 75 --virtual-batch-size 6"
CODE = """
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
"""


def model_file(folder: Path, code: str = CODE) -> Path:
    path = folder / "mine.py"
    path.write_text(code)
    return path


@pytest.mark.parametrize("name", ["Types"])
def test_the_weights_are_the_same_on_any_number_of_processes(name: str, tmp_path: Path) -> None:
    words = f"{WORDS} --model.name {model_file(tmp_path)}:{name}"
    for processes in (1, 2, 4):
        trained(tmp_path / str(processes), words, processes)
        assert_same(tmp_path / "1", tmp_path / str(processes))
