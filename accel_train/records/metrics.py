"""The metrics of a model. METRICS is the one place that defines them.

Training (`meter`), evaluation, the console, metrics.jsonl, the trackers and result.json all follow the table. To add
top-3 accuracy, add `top_k("top3_accuracy", 3)` to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """A number for each sample; its mean over the samples is what is shown and written."""

    name: str
    """Its key in metrics.jsonl. In result.json the keys are test_NAME and, for a headline, ema_test_NAME."""
    predict: Callable[[Tensor], Tensor]
    """What the score needs of the logits: from [b, classes] (float32 in evaluation) to a tensor [b, ...]."""
    score: Callable[[Tensor, Tensor], Tensor]
    """From that and the labels, int64 [b], to a finite number for each sample: bool or float [b]."""
    form: str
    """The format specification with which it is shown: ".2%" for a fraction."""
    training_predict: Callable[[Tensor], Tensor] | None = None
    """`predict` for training, where the logits may be in half precision. None: the metric is not counted there."""
    headline: bool = True
    """Whether the console shows it, and result.json has it for the EMA as well."""
    fewest_classes: int = 2
    """With fewer classes it is always 1, and the table of `accel-train evaluate` leaves it out."""

    def show(self, value: float) -> str:
        return format(value, self.form)


def five_highest(logits: Tensor) -> Tensor:
    """The classes of the five highest logits, int64 [b, min(5, classes)], the highest first."""
    return highest(logits, 5)


def highest(logits: Tensor, k: int) -> Tensor:
    return logits.topk(min(k, logits.shape[1])).indices


def very_highest(logits: Tensor) -> Tensor:
    """The class of the highest logit, int64 [b, 1]."""
    return logits.argmax(1, keepdim=True)


def is_first(classes: Tensor, labels: Tensor) -> Tensor:
    return classes[:, 0] == labels


def is_among(classes: Tensor, labels: Tensor) -> Tensor:
    return (classes == labels[:, None]).any(1)


def top_k(name: str, k: int, *, headline: bool = True) -> Metric:
    """The fraction of samples whose label is among the `k` highest logits, counted in evaluation only."""
    predict = five_highest if k == 5 else partial(highest, k=k)
    return Metric(name, predict, is_among, ".2%", headline=headline, fewest_classes=k + 1)


def same(logits: Tensor) -> Tensor:
    return logits


METRICS: list[Metric] = [
    # In training the loss is what the criterion returns (with label smoothing and class weights): see Meter.add.
    Metric("loss", same, partial(F.cross_entropy, reduction="none"), ".4f", training_predict=same),
    # Where logits are exactly equal, argmax and topk may choose different classes. In evaluation both accuracies come
    # from one topk, so that the first is never above the second.
    Metric("accuracy", five_highest, is_first, ".2%", training_predict=very_highest),
    top_k("top5_accuracy", 5, headline=False),
]


def training_metrics() -> list[Metric]:
    """The metrics that are counted while training, the loss first."""
    return [metric for metric in METRICS if metric.training_predict is not None]


def headlines(figures: Mapping[str, float]) -> dict[str, str]:
    """Those of the metrics' values that the console shows, as it shows them: {"accuracy": "97.50%"}."""
    shown = (metric for metric in METRICS if metric.headline and metric.name in figures)
    return {metric.name: metric.show(figures[metric.name]) for metric in shown}


@dataclass(frozen=True)
class Evaluation:
    """The results of a model on one split. Accuracies are from 0 to 1."""

    figures: dict[str, float]
    """The mean of each metric over the samples. The loss is the cross-entropy, without label smoothing."""
    count: int
    """Samples of the split."""
    confusion: list[list[int]]
    """[true class][predicted class]: number of samples."""

    @property
    def accuracy(self) -> float:
        return self.figures["accuracy"]

    @property
    def class_accuracy(self) -> list[float | None]:
        """The accuracy among the samples of each class; None for a class without any."""
        return [row[label] / sum(row) if sum(row) else None for label, row in enumerate(self.confusion)]
