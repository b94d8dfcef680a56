"""evaluate.py keeps results over many calls of a model, which may write each output to the same memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.evaluate import evaluate

SAMPLES, BATCH, CLASSES = 20, 4, 7


class Overwriting(nn.Module):
    """Its output is the same memory at each call, as that of a CUDA graph."""

    def __init__(self) -> None:
        super().__init__()
        self.output = torch.empty(BATCH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.output.copy_(inputs)


@pytest.mark.parametrize("multi_label", [False, True])
def test_the_next_call_overwrites_no_result(multi_label: bool) -> None:
    logits = torch.randn(SAMPLES, CLASSES, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(SAMPLES) % CLASSES
    rows = nn.functional.one_hot(labels, CLASSES).bool() if multi_label else labels
    batches = [
        {"inputs": logits[part], "labels": rows[part], "ids": part, "weights": torch.ones(BATCH)}
        for part in torch.arange(SAMPLES).split(BATCH)
    ]

    class Transform:
        num_classes = CLASSES

        def __call__(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            return batch["inputs"], batch["labels"]

    pipeline: Any = SimpleNamespace(batches=batches, samples=SAMPLES, multi_label=multi_label, transform=Transform())
    found = evaluate(Accelerator(cpu=True), Overwriting(), pipeline, keep_logits=True)
    expected = evaluate(Accelerator(cpu=True), nn.Identity(), pipeline, keep_logits=True)
    assert found.logits is not None and torch.equal(found.logits, logits)
    assert found.figures == expected.figures
