"""A model whose outputs are NaN in its first evaluations: no figure ends a run, and none of them is the best."""

from __future__ import annotations

from pathlib import Path

import helpers
import pytest

from accel_train import cli
from accel_train.api import evaluate

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

MINE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data(several):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (96, 1, 8, 8), dtype=torch.uint8, generator=generator)
    # Nine of ten images are of the class that argmax takes if all logits are NaN.
    labels = (torch.arange(96) % 10 == 0).long()
    rows = torch.stack([labels, 1 - labels], 1) if several else labels
    parts = {"train": slice(0, 48), "val": slice(48, 72), "test": slice(72, 96)}
    sets = {}
    for name, part in parts.items():
        sets[name] = TensorDataset(images[part], rows[part])
        sets[name].classes, sets[name].targets = ["usual", "rare"], rows[part]
    return sets

def one():
    return data(False)

def several():
    return data(True)

class Late(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layer = nn.Linear(64, num_classes)
        nn.init.constant_(self.layer.bias, 0)
        self.layer.bias.data[-1] = 9.0  # it says "rare" of every image
        self.seen = 0

    def forward(self, images):
        self.seen += len(images) if self.training else 0
        logits = self.layer(images.flatten(1))
        if not self.training and self.seen <= 80:
            logits = logits * float("nan")
        return logits

def net(num_classes, **kwargs):
    return Late(num_classes)
"""
RECIPE = """
data: {{name: mine.py:{data}, workers: 0}}
model: {{name: mine.py:net}}
loss: {{name: {loss}}}
optim: {{lr: 1.0e-9}}
schedule: {{name: constant}}
epochs: 3
batch_size: 12
"""  # four updates of 12 images an epoch


def trained(folder: Path, *, several: bool) -> Path:
    (folder / "mine.py").write_text(MINE)
    recipe = folder / "recipe.yaml"
    data, loss = ("several", "bce") if several else ("one", "cross_entropy")
    recipe.write_text(RECIPE.format(data=data, loss=loss))
    done = helpers.run(recipe, "--output-dir", folder / "run")
    assert done.returncode == 0, done.stderr[-1500:]
    warnings = [line for line in done.stderr.splitlines() if "NaN" in line]
    assert warnings == [
        "accel-train: warning: val: the model's output is NaN or infinite for 24 of 24 images, so there are no metrics"
    ]
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_a_first_figure_of_nan_ends_no_run_and_is_not_the_best(tmp_path: Path, *, several: bool) -> None:
    run = trained(tmp_path, several=several)
    result = helpers.result_of(run)
    name = "map" if several else "accuracy"
    first, second, _ = helpers.lines_of(run, "eval", "val")
    assert first[name] is None and first["loss"] is None
    assert result["best_value"] == second[name] > 0
    assert result["best_update"] == 8
    assert result[f"test_{name}"] > 0

    # Loaded again, the model is NaN once more.
    again = evaluate(run, trust_code=True).metrics["model"]
    assert again[name] is None and again["count"] == 24
    assert cli.main(["evaluate", str(run), "--trust-code", "true"]) == 0
    page = run / "report.html"
    assert cli.main(["report", str(run), "--output", str(page), "--trust-code", "true"]) == 0
    assert cli.main(["runs", str(tmp_path)]) == 0
