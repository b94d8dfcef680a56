"""evaluate.py: each sample of a split counts exactly once, whatever its batch; real splits are in tests/tools."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import helpers
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.config.schema import Config
from accel_train.data.loading import evaluation_batch_size
from accel_train.evaluate import evaluate
from accel_train.records.metrics import Evaluation
from accel_train.task import ONE_LABEL

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
        loader=None,
        batches=[{"ids": ids.abs(), "weights": (ids >= 0).float()} for ids in numbers],
        transform=transform,
        samples=len(LABELS),
        task=ONE_LABEL,
    )
    return evaluate(Accelerator(cpu=True), model or Net(), pipeline, **options)  # type: ignore[arg-type]


def test_each_sample_counts_once_in_any_batches() -> None:
    whole = evaluated(LOGITS, [0, 1, 2, 3, 4])
    parts = evaluated(LOGITS, [3, 1], [4, 0], [2, -3], keep_logits=True)
    assert parts.metrics == whole.metrics and parts.count == 5
    assert parts.metrics["accuracy"] == 3 / 5 and parts.metrics["top5_accuracy"] == 1
    assert parts.metrics["loss"] == pytest.approx(nn.functional.cross_entropy(LOGITS, LABELS).item())
    assert parts.labels is not None and torch.equal(parts.labels, LABELS)
    assert parts.logits is not None and torch.equal(parts.logits, LOGITS)  # in the order of the samples' numbers


def test_rows_are_true_classes_and_columns_predicted_ones() -> None:
    found = evaluated(LOGITS, [0, 1, 2, 3, 4])
    assert found.confusion == [[1, 1, 0], [0, 1, 0], [1, 0, 1]]
    assert found.images == [2, 1, 2] and found.class_metrics == {"accuracy": [0.5, 1.0, 0.5]}


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
    assert found.broken == 1 and all(math.isnan(figure) for figure in found.metrics.values())
    assert found.confusion is None and found.class_metrics == {"accuracy": [None] * 3} and found.images == [2, 1, 2]
    assert "NaN or infinite for 1 of 5 images" in (found.warning("val") or "")


def test_a_small_split_is_padded_to_a_power_of_two() -> None:
    sizes = {samples: evaluation_batch_size(Config(), samples) for samples in (1, 2, 3, 8, 9, 129, 256, 257, 50_000)}
    assert sizes == {1: 1, 2: 2, 3: 4, 8: 8, 9: 16, 129: 256, 256: 256, 257: 256, 50_000: 256}
    assert evaluation_batch_size(Config(), 5_000, largest=512) == 512  # as many as are trained at once
    assert evaluation_batch_size(Config(eval_batch_size=64), 8) == evaluation_batch_size(Config(eval_batch_size=64), 99)


MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(64, 10)

    def forward(self, inputs):
        if not self.training and len(inputs) != 64:
            with open({file!r}, "a") as file:
                file.write(f"{{len(inputs)}} ")
        return self.head(inputs.flatten(1))

def net(num_classes, in_chans):
    return Net()
"""


@pytest.mark.ci
@pytest.mark.parametrize("processes", [1, 2])
def test_training_evaluates_a_small_split_in_a_small_batch(tmp_path: Path, processes: int) -> None:
    (tmp_path / "mine.py").write_text(MODEL.format(file=str(tmp_path / "sizes")))
    words = ["digits", "--model.name", f"{tmp_path}/mine.py:net", "--epochs", "1", "--data.test-limit", "7"]
    done = helpers.run(*words, "--output-dir", str(tmp_path / "run"), processes=processes)
    assert done.returncode == 0, done.stderr
    sizes = (tmp_path / "sizes").read_text().split()
    assert "8" in sizes and "256" not in sizes
