"""The task: whether an image has one label or may have several, and the metrics that follow from it.

ONE_LABEL and SEVERAL_LABELS are the one place that says in what the two differ; only readers of data and writers of
files ask which it is. Training (`meter`), evaluation, the console, metrics.jsonl, the trackers, result.json and reports
follow their tables of metrics. To add top-3 accuracy, add `top_k("top3_accuracy", 3)` to a table. The metrics of
--metrics come after it: see `records.metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train.errors import UserError
from accel_train.user_code import metric_name, short_name


@dataclass(frozen=True)
class Metric:
    """A number that an evaluation has of a split: how it is called and shown."""

    name: str
    """Its key in metrics.jsonl. In result.json the keys are test_NAME and, of the EMA, ema_test_NAME."""
    form: str = ".2%"
    """The format specification with which it is shown: a fraction in percent."""
    title: str = ""
    """What reports call it; "": by its name."""
    headline: bool = True
    """Whether the console shows it."""
    fewest_classes: int = 2
    """With fewer classes it is always 1, and the table of `accel-train evaluate` leaves it out."""
    lower_is_better: bool = False
    chosen: bool = False
    """Whether --metrics names it."""

    def show(self, value: float) -> str:
        return format(value, self.form)


@dataclass(frozen=True, kw_only=True)
class MeanMetric(Metric):
    """A number for each sample; its mean over the samples is what is shown and written."""

    predict: Callable[[Tensor], Tensor]
    """What the score needs of the logits: from [b, classes] (float32 in evaluation) to a tensor [b, ...]."""
    score: Callable[[Tensor, Tensor], Tensor]
    """From that and the labels (int64 [b], or bool [b, classes] if an image may have several) to a finite number for
    each sample: bool or float [b]."""
    training_predict: Callable[[Tensor], Tensor] | None = None
    """`predict` for training, where the logits may be in half precision. None: the metric is not counted there."""


@dataclass(frozen=True, kw_only=True)
class SplitMetric(Metric):
    """A number that only a whole split has: it is no mean over samples, so training does not count it."""

    compute: Callable[[Tensor, Tensor], float]
    """A finite number from the predictions and the labels of all samples, both int64 [n]; or, if an image may have
    several labels, from logits float32 [n, classes] and labels bool [n, classes]. On the CPU, in the order of the
    samples' numbers. How many classes there are is not told to the former: a class may occur in neither."""


def highest(logits: Tensor, k: int) -> Tensor:
    """The classes of the `k` highest logits, int64 [b, min(k, classes)]; the first one is that of argmax."""
    best = logits.topk(min(k, logits.shape[1])).indices
    # Of equal logits argmax returns the first class, as NumPy does; topk any. So argmax takes the first place, and the
    # class that was there takes argmax's, or the last one's if that is not among them.
    first = logits.argmax(1, keepdim=True)
    is_first = best == first
    is_first[:, -1] |= ~is_first.any(1)
    best = torch.where(is_first, best[:, :1], best)
    best[:, :1] = first
    return best


top5 = partial(highest, k=5)


def is_first(classes: Tensor, labels: Tensor) -> Tensor:
    return classes[:, 0] == labels


def is_among(classes: Tensor, labels: Tensor) -> Tensor:
    return (classes == labels[:, None]).any(1)


def top_k(name: str, k: int, *, headline: bool = True) -> MeanMetric:
    """The fraction of samples whose label is among the `k` highest logits, counted in evaluation only."""
    predict = top5 if k == 5 else partial(highest, k=k)
    title = f"top-{k} accuracy"
    return MeanMetric(name, title=title, headline=headline, fewest_classes=k + 1, predict=predict, score=is_among)


def same(logits: Tensor) -> Tensor:
    return logits


def mean_loss(score: Callable[[Tensor, Tensor], Tensor]) -> MeanMetric:
    """In training the loss is what the criterion returns (with label smoothing and class weights): see Meter.add."""
    return MeanMetric("loss", ".4f", lower_is_better=True, predict=same, score=score, training_predict=same)


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Each class for itself, then the mean over the classes."""
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").mean(1)


def f1_of_classes(predicted: Tensor, labels: Tensor) -> list[float | None]:
    """The F1 of each class, 2 hits / (images with the label + images where it is predicted); None if both are 0.

    Takes what `SplitMetric.compute` takes; a class is predicted from a probability of 0.5 on.
    """
    if labels.ndim == 2:
        chosen = predicted >= 0
        counts = [(chosen & labels).sum(0), labels.sum(0), chosen.sum(0)]
    else:
        classes, hits = int(torch.maximum(predicted.max(), labels.max())) + 1, labels[labels == predicted]
        counts = [torch.bincount(values, minlength=classes) for values in (hits, labels, predicted)]
    return [2 * hit / (true + said) if true + said else None for hit, true, said in torch.stack(counts).T.tolist()]


def macro_f1(predicted: Tensor, labels: Tensor) -> float:
    """The mean F1 of the classes that occur as a label or as a prediction, as in scikit-learn's `f1_score`."""
    return _mean(f1_of_classes(predicted, labels))


def average_precision_of_classes(logits: Tensor, labels: Tensor) -> list[float | None]:
    """The average precision of each class, as scikit-learn's `average_precision_score`; None without an image of it.

    Here and below: logits float32 [n, classes], labels bool [n, classes].
    """
    from sklearn.metrics import average_precision_score  # most runs do not need it

    pairs = zip(logits.numpy().T, labels.numpy().T, strict=True)
    return [float(average_precision_score(truth, scores)) if truth.any() else None for scores, truth in pairs]


def mean_average_precision(logits: Tensor, labels: Tensor) -> float:
    """mAP: the mean of the average precision over the classes that an image has; 0 if there is no label at all."""
    return _mean(average_precision_of_classes(logits, labels))


def _mean(values: list[float | None]) -> float:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else 0.0


def accuracy_of_classes(predicted: Tensor, labels: Tensor) -> list[float | None]:
    """The recall of each class up to the last one that has an image, from both int64 [n]; None without an image."""
    images = torch.bincount(labels)
    hits = torch.bincount(labels[labels == predicted], minlength=len(images))
    return [hit / count if count else None for hit, count in zip(hits.tolist(), images.tolist(), strict=True)]


@dataclass(frozen=True, eq=False)
class Task:
    """What an image has as labels, and what follows from it. There are two: ONE_LABEL and SEVERAL_LABELS.

    The labels of the data decide (`task_of`), not the loss: also a model of one label can be trained with the binary
    cross-entropy of each class.
    """

    kind: str
    """The data, in words."""
    metrics: list[MeanMetric | SplitMetric]
    """Those of every evaluation. The loss is among them, as it is computed whatever was trained with."""
    class_metrics: Mapping[str, Callable[[Tensor, Tensor], list[float | None]]]
    """Metrics of each class, by name: of what `SplitMetric.compute` takes."""
    best_metric: str
    """By which a model is judged, unless --best-metric names another one."""
    loss: str
    """The --loss.name of the loss in `metrics`."""
    loss_title: str
    keeps_logits: bool
    """Whether the metrics of a whole split need the logits of each sample, not only its predicted class."""
    activation: Literal["softmax", "sigmoid"]
    """From logits to probabilities."""
    top_k: int | None
    """How many classes of an image are predicted by default; None: those from `threshold` on."""
    threshold: float | None
    """The least probability of a predicted class by default; None: an image has its most probable class in any case."""

    @property
    def training_metrics(self) -> list[MeanMetric]:
        """The metrics that are counted while training, the loss first."""
        means = (metric for metric in self.metrics if isinstance(metric, MeanMetric))
        return [metric for metric in means if metric.training_predict is not None]

    def evaluation_metrics(self, chosen: Sequence[str]) -> list[Metric]:
        """All metrics of an evaluation: the task's, and after them those that are `chosen` by --metrics."""
        return [*self.metrics, *(Metric(metric_name(text), ".4f", chosen=True) for text in chosen)]

    def training_loss(self, name: str) -> str:
        """What the loss of training is called beside that of evaluation; "" if both are one. `name`: --loss.name."""
        return "" if name == self.loss else f"training loss ({short_name('loss.name', name)})"

    def probabilities(self, logits: Tensor) -> Tensor:
        """Of each class, from logits [b, classes]."""
        return logits.softmax(1) if self.activation == "softmax" else logits.sigmoid()

    def labels_of(self, targets: Tensor) -> Tensor:
        """The labels, as the data has them, for which a loss's targets stand: int64 [b], or probabilities [b, classes],
        of which the largest counts, or with several labels those of 0.5 and more."""
        if self is SEVERAL_LABELS:
            return targets >= 0.5
        return targets if targets.ndim == 1 else targets.argmax(1)

    def example_targets(self, samples: int, classes: int) -> Tensor:
        """Targets of made-up samples, to try a user's own code with: int64 [samples] or float32 [samples, classes].

        If there are enough samples, each of several classes has some.
        """
        labels = torch.arange(samples) % classes
        if self is SEVERAL_LABELS:
            return ((labels[:, None] + torch.arange(classes)) % 2).float()
        return labels

    def __reduce__(self) -> str:
        """A copy, also in another process, is the same object."""
        return "SEVERAL_LABELS" if self is SEVERAL_LABELS else "ONE_LABEL"

    def check_one_label(self, option: str, advice: str) -> None:
        """Raise UserError if images may have several labels, for an `option` that expects one."""
        if self is SEVERAL_LABELS:
            raise UserError(
                f"{option}: expects one label for each image, but the images of this data may have several labels or "
                f"none; {advice}"
            )


ONE_LABEL = Task(
    kind="images with one label each",
    metrics=[
        mean_loss(partial(F.cross_entropy, reduction="none")),
        # In evaluation both accuracies come from one topk, so that the first is never above the second.
        MeanMetric(
            "accuracy", predict=top5, score=is_first, training_predict=partial(torch.argmax, dim=1, keepdim=True)
        ),
        top_k("top5_accuracy", 5, headline=False),
        SplitMetric("f1", title="macro F1", headline=False, compute=macro_f1),
    ],
    class_metrics={"accuracy": accuracy_of_classes},
    best_metric="accuracy",
    loss="cross_entropy",
    loss_title="cross-entropy",
    keeps_logits=False,
    activation="softmax",
    top_k=5,
    threshold=None,
)
"""Labels are int64 [n]."""

SEVERAL_LABELS = Task(
    kind="images with several labels",
    metrics=[
        mean_loss(binary_cross_entropy),
        SplitMetric("map", title="mean average precision", compute=mean_average_precision),
        SplitMetric("f1", title="macro F1", compute=macro_f1),
    ],
    class_metrics={"average_precision": average_precision_of_classes, "f1": f1_of_classes},
    best_metric="map",
    loss="binary_cross_entropy",
    loss_title="binary cross-entropy",
    keeps_logits=True,
    activation="sigmoid",
    top_k=None,
    threshold=0.5,
)
"""Images may have several labels, or none: labels are bool [n, classes]."""

BUILT_IN_METRICS = ONE_LABEL.metrics + SEVERAL_LABELS.metrics
LOWER_IS_BETTER = {metric.name for metric in BUILT_IN_METRICS if metric.lower_is_better}


def task_of(labels: Tensor) -> Task:
    """The task of data with these labels: int64 [n], or bool [n, classes]."""
    return SEVERAL_LABELS if labels.ndim == 2 else ONE_LABEL


def headlines(values: Mapping[str, float], metrics: Sequence[Metric]) -> dict[str, str]:
    """Those of the metrics' values that the console shows, as it shows them: {"accuracy": "97.50%"}."""
    shown = (metric for metric in metrics if metric.headline)
    return {metric.name: metric.show(values[metric.name]) for metric in shown if metric.name in values}


def metric_title(name: str) -> str:
    """What reports call a metric, such as "top-5 accuracy" for "top5_accuracy"."""
    titles = {metric.name: metric.title for metric in BUILT_IN_METRICS}
    return titles.get(name) or name.replace("_", " ")
