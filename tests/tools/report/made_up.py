"""Made-up records of runs, for pages that no quick training would give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import confusion_matrix

from accel_train.config.schema import Config
from accel_train.records.model_info import ModelInfo
from accel_train.task import ONE_LABEL, Task
from accel_train.tools.evaluate_run import added_metrics
from accel_train.tools.report.records import RunRecords

Losses = Sequence[float | None]


def made_up_run(
    names: Sequence[str] = ("cat", "dog"),
    *,
    train: Losses = (),
    val: Losses = (),
    test: Losses = (),
    ema: Losses = (),
    task: Task = ONE_LABEL,
    data: dict[str, Any] | None = None,
    config: Config | None = None,
) -> RunRecords:
    """The records of a run with the classes `names` and ten updates an epoch. `train`, `val`, `test`, `ema` (of val):
    the loss of each epoch; the accuracy is 1 - loss / 10."""
    lines: list[dict[str, Any]] = []
    kinds = (("train", "model", train), ("val", "model", val), ("val", "ema", ema), ("test", "model", test))
    for split, weights, losses in kinds:
        for epoch, loss in enumerate(losses, 1):
            row = {"kind": "eval", "split": split, "weights": weights, "epoch": epoch, "update": 10 * epoch}
            figures = {"loss": loss, task.best_metric: None if loss is None else 1 - loss / 10, "count": 100}
            lines.append(row | figures)
    for update in range(1, 10 * len(train) + 1):
        row = {"kind": "train", "update": update, "epoch": (update + 9) // 10, "loss": 1.0, "accuracy": 0.5}
        lines.append(row | {"lr": 0.1, "images_per_second": 500.0, "data_wait_fraction": 0.1})
    done = len(train) or 1
    result = {"epochs": done, "updates": 10 * done, "stopped_by": "epochs", "images_per_second": 500.0}
    if val:
        result["best_update"] = 10 * (1 + min(range(len(val)), key=lambda epoch: val[epoch] or math.inf))
    return RunRecords(
        Path("there is no such folder"),
        config or Config(epochs=done, recipe="digits"),
        ModelInfo(tuple(names), 3, 32, None, (0.5,) * 3, (0.5,) * 3, task=task),
        result,
        {"state": "finished", "epoch": done, "update": 10 * done, "updates": 10 * done},
        {"host": "here"},
        lines,
        data or {},
    )


def made_up_evaluation(names: Sequence[str], count: int) -> dict[str, Any]:
    """What evaluation-test.json holds for random logits, of which the true class's are higher."""
    numbers = np.random.default_rng(0)
    labels = numbers.integers(len(names), size=count)
    logits = numbers.normal(size=(count, len(names))).astype(np.float32)
    logits[np.arange(count), labels] += 3
    return evaluation_of(labels, logits, names)


def evaluation_of(labels: Any, logits: Any, names: Sequence[str]) -> dict[str, Any]:
    confusion = confusion_matrix(labels, logits.argmax(1), labels=range(len(names)))
    accuracy = float((labels == logits.argmax(1)).mean())
    figures = {"weights": "model.safetensors", "loss": 1.0, "accuracy": accuracy, "count": len(labels)}
    more = {"confusion": confusion.tolist(), "top5_accuracy": 0.9}
    return {"split": "test", "model": figures | added_metrics(logits, labels) | more}


def evaluation_by_counts(confusion: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What evaluation-test.json holds for these counts [true class][predicted class]."""
    counts = np.array(confusion)
    labels = np.repeat(np.arange(len(counts)), counts.sum(1))
    predicted = np.concatenate([np.repeat(np.arange(len(counts)), row) for row in counts])
    logits = np.eye(len(counts), dtype=np.float32)[predicted]
    return evaluation_of(labels, logits, [""] * len(counts))


def several_labels_evaluation(names: Sequence[str], count: int, share: float) -> dict[str, Any]:
    """Each class is a label of the fraction `share` of the images."""
    numbers = np.random.default_rng(0)
    labels = np.zeros((count, len(names)), dtype=bool)
    labels[: round(share * count)] = True
    logits = (numbers.normal(size=labels.shape) + 2 * labels - 1).astype(np.float32)
    figures = {"weights": "model.safetensors", "loss": 0.3, "map": 0.8, "f1": 0.7, "count": count}
    images = labels.sum(0).tolist()
    more = {"class_average_precision": [0.8] * len(names), "class_images": images}
    return {"split": "test", "model": figures | added_metrics(logits, labels) | more}
