"""evaluate.py: each sample of a split counts exactly once, whatever its batch; real splits are in tests/analysis."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.evaluate import evaluate
from accel_train.records.metrics import Evaluation

LABELS = torch.tensor([0, 0, 1, 2, 2])
LOGITS = torch.tensor([[0.0, 3.0, 1.0], [3.0, 1.0, 0.0], [0.0, 2.0, 1.0], [0.0, 1.0, 5.0], [4.0, 1.0, 3.0]])


class Net(nn.Module):
    """Its inputs are the logits already. Notes in which mode it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: set[bool] = set()

    def forward(self, inputs: Tensor) -> Tensor:
        self.modes.add(self.training)
        return inputs


def evaluated(logits: Tensor, *batches: list[int], model: nn.Module | None = None, **options: Any) -> Evaluation:
    """Evaluate these batches of samples; a negative number is padding, which repeats a sample with weight 0."""
    transform: Any = lambda batch: (logits[batch["ids"]], LABELS[batch["ids"]])  # noqa: E731
    transform.num_classes = 3
    numbers = [torch.tensor(ids) for ids in batches]
    pipeline = SimpleNamespace(
        batches=[{"ids": ids.abs(), "weights": (ids >= 0).float()} for ids in numbers],
        transform=transform,
        samples=len(LABELS),
        multi_label=False,
    )
    return evaluate(Accelerator(cpu=True), model or Net(), pipeline, **options)  # type: ignore[arg-type]


def test_each_sample_counts_once_in_any_batches() -> None:
    whole = evaluated(LOGITS, [0, 1, 2, 3, 4])
    parts = evaluated(LOGITS, [3, 1], [4, 0], [2, -3], keep_logits=True)
    assert parts.figures == whole.figures and parts.count == 5
    assert parts.figures["accuracy"] == 3 / 5 and parts.figures["top5_accuracy"] == 1
    assert parts.figures["loss"] == pytest.approx(nn.functional.cross_entropy(LOGITS, LABELS).item())
    assert parts.labels is not None and torch.equal(parts.labels, LABELS)
    assert parts.logits is not None and torch.equal(parts.logits, LOGITS)  # in the order of the samples' numbers


def test_rows_are_true_classes_and_columns_predicted_ones() -> None:
    found = evaluated(LOGITS, [0, 1, 2, 3, 4])
    assert found.confusion == [[1, 1, 0], [0, 1, 0], [1, 0, 1]]
    assert found.images == [2, 1, 2] and found.of_classes == {"accuracy": [0.5, 1.0, 0.5]}


@pytest.mark.parametrize("batches", [[[0, 1, 2, 3]], [[0, 1, 2, 3, 4, 4]], [[0, 1, 2, 3, 3]]])
def test_a_sample_that_is_missing_or_counted_twice_is_an_error(batches: list[list[int]]) -> None:
    with pytest.raises(RuntimeError, match="but the split has 5 samples"):
        evaluated(LOGITS, *batches)


def test_the_model_is_in_evaluation_mode() -> None:
    model = Net().train()
    evaluated(LOGITS, [0, 1, 2, 3, 4], model=model)
    assert model.modes == {False}


def test_an_output_of_nan_leaves_no_figure() -> None:
    logits = LOGITS.clone()
    logits[2, 0] = math.nan
    found = evaluated(logits, [0, 1, 2], [3, 4])
    assert found.broken == 1 and all(math.isnan(figure) for figure in found.figures.values())
    assert found.confusion is None and found.of_classes == {"accuracy": [None] * 3} and found.images == [2, 1, 2]
    assert "NaN or infinite for 1 of 5 images" in (found.warning("val") or "")


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
