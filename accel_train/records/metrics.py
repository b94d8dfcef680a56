"""The metrics of a model. METRICS is the one place that defines them; MULTI_LABEL_METRICS for several labels an image.

Training (`meter`), evaluation, the console, metrics.jsonl, the trackers and result.json all follow the table. To add
top-3 accuracy, add `top_k("top3_accuracy", 3)` to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train.config.schema import BestMetric, Config
from accel_train.data.sources.splits import Splits
from accel_train.errors import UserError


@dataclass(frozen=True)
class Metric:
    """A number for each sample; its mean over the samples is what is shown and written."""

    name: str
    """Its key in metrics.jsonl. In result.json the keys are test_NAME and, for a headline, ema_test_NAME."""
    predict: Callable[[Tensor], Tensor]
    """What the score needs of the logits: from [b, classes] (float32 in evaluation) to a tensor [b, ...]."""
    score: Callable[[Tensor, Tensor], Tensor]
    """From that and the labels (int64 [b], or bool [b, classes] if an image may have several) to a finite number for
    each sample: bool or float [b]."""
    form: str
    """The format specification with which it is shown: ".2%" for a fraction."""
    training_predict: Callable[[Tensor], Tensor] | None = None
    """`predict` for training, where the logits may be in half precision. None: the metric is not counted there."""
    headline: bool = True
    """Whether the console shows it, and result.json has it for the EMA as well."""
    fewest_classes: int = 2
    """With fewer classes it is always 1, and the table of `accel-train evaluate` leaves it out."""
    lower_is_better: bool = False

    def show(self, value: float) -> str:
        return format(value, self.form)


@dataclass(frozen=True)
class SplitMetric:
    """A number that only a whole split has: it is no mean over samples, so training does not count it."""

    name: str
    """As that of `Metric`, and so are the last four."""
    compute: Callable[[Tensor, Tensor], float]
    """A finite number from the predictions and the labels of all samples, both int64 [n]; or, if an image may have
    several labels, from logits float32 [n, classes] and labels bool [n, classes]. On the CPU, in the order of the
    samples' numbers."""
    form: str
    headline: bool = True
    fewest_classes: int = 2
    lower_is_better: bool = False

    def show(self, value: float) -> str:
        return format(value, self.form)


def five_highest(logits: Tensor) -> Tensor:
    """The classes of the five highest logits, int64 [b, min(5, classes)]; the first one is that of argmax."""
    return highest(logits, 5)


def highest(logits: Tensor, k: int) -> Tensor:
    best = logits.topk(min(k, logits.shape[1])).indices
    # Of equal logits argmax returns the first class, as NumPy does; topk any. So argmax takes the first place, and the
    # class that was there takes argmax's, or the last one's if that is not among them.
    first = logits.argmax(1, keepdim=True)
    is_first = best == first
    is_first[:, -1] |= ~is_first.any(1)
    best = torch.where(is_first, best[:, :1], best)
    best[:, :1] = first
    return best


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


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Each class for itself, then the mean over the classes."""
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").mean(1)


def f1_of_classes(predicted: Tensor, labels: Tensor) -> list[float | None]:
    """The F1 of each class, 2 hits / (images with the label + images where it is predicted); None if both are 0.

    Takes what `SplitMetric.compute` takes; a class is predicted from a probability of 0.5 on.
    """
    return [2 * hits / both if both else None for hits, both in _hits(predicted, labels).T.tolist()]


def _hits(predicted: Tensor, labels: Tensor) -> Tensor:
    """int64 [2, classes]: images where the predicted label is true; then true labels plus predicted labels."""
    if labels.ndim == 2:
        chosen = predicted >= 0
        return torch.stack([(chosen & labels).sum(0), labels.sum(0) + chosen.sum(0)])
    classes = int(torch.maximum(predicted.max(), labels.max())) + 1
    counts = (torch.bincount(values, minlength=classes) for values in (labels[labels == predicted], labels, predicted))
    hits, true, chosen = counts
    return torch.stack([hits, true + chosen])


def macro_f1(predicted: Tensor, labels: Tensor) -> float:
    """The mean F1 of the classes that occur as a label or as a prediction, as in scikit-learn's `f1_score`."""
    return _mean(f1_of_classes(predicted, labels))


def micro_f1(predicted: Tensor, labels: Tensor) -> float:
    """The F1 over all pairs of an image and a class together; 0 if there is no label at all."""
    hits, both = _hits(predicted, labels).sum(1).tolist()
    return 2 * hits / both if both else 0.0


def average_precision_of_classes(logits: Tensor, labels: Tensor) -> list[float | None]:
    """The average precision of each class, as scikit-learn's `average_precision_score`; None without an image of it."""
    pairs = zip(logits.T.numpy(), labels.T.numpy(), strict=True)
    return [_average_precision(scores, truth) if truth.any() else None for scores, truth in pairs]


def mean_average_precision(logits: Tensor, labels: Tensor) -> float:
    """mAP: the mean of the average precision over the classes that an image has."""
    return _mean(average_precision_of_classes(logits, labels))


def micro_average_precision(logits: Tensor, labels: Tensor) -> float:
    """The average precision over all pairs of an image and a class together; 0 if there is no label at all."""
    return _average_precision(logits.flatten().numpy(), labels.flatten().numpy()) if labels.any() else 0.0


def _average_precision(scores: npt.NDArray[np.float32], truth: npt.NDArray[np.bool_]) -> float:
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(truth, scores))


def _mean(values: list[float | None]) -> float:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else 0.0


METRICS: list[Metric | SplitMetric] = [
    # In training the loss is what the criterion returns (with label smoothing and class weights): see Meter.add.
    Metric(
        "loss", same, partial(F.cross_entropy, reduction="none"), ".4f", training_predict=same, lower_is_better=True
    ),
    # In evaluation both accuracies come from one topk, so that the first is never above the second.
    Metric("accuracy", five_highest, is_first, ".2%", training_predict=very_highest),
    top_k("top5_accuracy", 5, headline=False),
    SplitMetric("f1", macro_f1, ".2%", headline=False),
]

MULTI_LABEL_METRICS: list[Metric | SplitMetric] = [
    Metric("loss", same, binary_cross_entropy, ".4f", training_predict=same, lower_is_better=True),
    SplitMetric("map", mean_average_precision, ".2%"),
    SplitMetric("micro_map", micro_average_precision, ".2%", headline=False),
    SplitMetric("f1", macro_f1, ".2%"),
    SplitMetric("micro_f1", micro_f1, ".2%", headline=False),
]


def metrics_for(*, multi_label: bool) -> list[Metric | SplitMetric]:
    """The metrics of data whose images have one label each, or (`multi_label`) several or none."""
    return MULTI_LABEL_METRICS if multi_label else METRICS


def mean_metrics(*, multi_label: bool = False) -> list[Metric]:
    """The metrics that are means over samples."""
    return [metric for metric in metrics_for(multi_label=multi_label) if isinstance(metric, Metric)]


def training_metrics(*, multi_label: bool = False) -> list[Metric]:
    """The metrics that are counted while training, the loss first."""
    return [metric for metric in mean_metrics(multi_label=multi_label) if metric.training_predict is not None]


def headlines(figures: Mapping[str, float]) -> dict[str, str]:
    """Those of the metrics' values that the console shows, as it shows them: {"accuracy": "97.50%"}."""
    # Only multi-label data has a mean average precision.
    shown = (metric for metric in metrics_for(multi_label="map" in figures) if metric.headline)
    return {metric.name: metric.show(figures[metric.name]) for metric in shown if metric.name in figures}


@dataclass(frozen=True)
class Evaluation:
    """The results of a model on one split. Fractions are from 0 to 1."""

    figures: dict[str, float]
    """Each metric. The loss is the cross-entropy, or with several labels an image the binary cross-entropy, without
    label smoothing and class weights."""
    count: int
    """Samples of the split."""
    of_classes: dict[str, list[float | None]]
    """Figures of each class, by name; None where it has no image. One label an image: "accuracy"; several:
    "average_precision" and "f1"."""
    images: list[int]
    """Of each class: images that have it as a label."""
    confusion: list[list[int]] | None = None
    """[true class][predicted class]: number of samples. None if an image may have several labels."""
    labels: Tensor | None = None
    """What the source has as labels, and the model's logits, float32 [n, classes], in the order of the samples'
    numbers, on the CPU of the main process. None unless they were to be kept."""
    logits: Tensor | None = None
    broken: int = 0
    """Samples for which the model's output is NaN (or infinite, with several labels an image). If there are any, the
    figures are NaN, and those of the classes None."""

    @classmethod
    def without_figures(
        cls, metrics: Sequence[Metric | SplitMetric], labels: Tensor, classes: int, broken: int, logits: Tensor | None
    ) -> Evaluation:
        """The result for a split with `broken` samples. `labels`: int64 [n], or bool [n, classes]."""
        images = labels.sum(0) if labels.ndim == 2 else torch.bincount(labels, minlength=classes)
        of_classes = ("average_precision", "f1") if labels.ndim == 2 else ("accuracy",)
        return cls(
            {metric.name: math.nan for metric in metrics},
            len(labels),
            {name: [None] * classes for name in of_classes},
            images.tolist(),
            labels=labels,
            logits=logits,
            broken=broken,
        )

    def deciding(self, metric: str) -> float:
        """The figure that decides about the best checkpoint, the plateau schedule and the patience.

        NaN if the loss is not finite, whatever the metric is: the accuracy of such outputs may be high by chance, and
        would stay the best.
        """
        return self.figures[metric] if math.isfinite(self.figures["loss"]) else math.nan

    def warning(self, name: str) -> str | None:
        """A sentence about the evaluation `name` if it has no figures, else None."""
        if not self.broken:
            return None
        return (
            f"{name}: the model's output is NaN or infinite for {self.broken:,} of {self.count:,} images, so there are "
            "no figures"
        )

    def as_record(self) -> dict[str, Any]:
        """The figures of the classes as result.json and evaluation-SPLIT.json have them."""
        record: dict[str, Any] = {f"class_{name}": values for name, values in self.of_classes.items()}
        return record | ({"class_images": self.images} if self.confusion is None else {"confusion": self.confusion})


LOWER_IS_BETTER = {metric.name for metric in METRICS + MULTI_LABEL_METRICS if metric.lower_is_better}


def best_metric(config: Config, *, multi_label: bool) -> str:
    """The name of the figure that decides about the best checkpoint, the plateau schedule and the patience."""
    return config.best_metric or ("map" if multi_label else "accuracy")


def check_best_metric(config: Config, splits: Splits) -> None:
    """Raise UserError if the data does not have the figure, or if an option needs a validation split and has none."""
    for option, setting in (("best-metric", config.best_metric), ("stop.patience-epochs", config.stop.patience_epochs)):
        if setting is not None and splits.validation is None:
            raise UserError(
                f"--{option} {setting}: follows the validation split, but this data has none: set one aside with "
                "--data.val-fraction 0.1, or remove the option."
            )
    names = [metric.name for metric in metrics_for(multi_label=splits.multi_label)]
    if config.best_metric is not None and config.best_metric not in names:
        kind = "images with several labels" if splits.multi_label else "images with one label each"
        usable = ", ".join(name for name in get_args(BestMetric) if name in names)
        raise UserError(f"--best-metric {config.best_metric}: this data has {kind}; choose one of {usable}.")
