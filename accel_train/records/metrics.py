"""The metrics of a model. METRICS is the one place that defines them; MULTI_LABEL_METRICS for several labels an image.

Training (`meter`), evaluation, the console, metrics.jsonl, the trackers, result.json and reports follow the table.
To add top-3 accuracy, add `top_k("top3_accuracy", 3)` to it. Those of --metrics come after it: see `OwnMetrics`.

The main process computes those of --metrics, a user's functions of logits and targets and metrics of torchmetrics, on
its CPU, for the logits of a whole split, which it gets from all processes, in the order of the samples' numbers: so
their bits do not depend on the number of processes. Only the main process imports the code, and tries each metric with
made-up logits.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.config.declaration import TAKEN_NAMES
from accel_train.data.sources.splits import Splits
from accel_train.errors import MetricError, UserError
from accel_train.launch.agreement import broadcast_from_main
from accel_train.user_code.loading import call, load, showing_user_lines
from accel_train.user_code.reference import Reference, given_metrics, metric_name, parse_reference, short_name


@dataclass(frozen=True)
class Metric:
    """A number that an evaluation has of a split: how it is called and shown."""

    name: str
    """Its key in metrics.jsonl. In result.json the keys are test_NAME and, for a headline, ema_test_NAME."""
    form: str = ".2%"
    """The format specification with which it is shown: a fraction in percent."""
    title: str = ""
    """What reports call it; "": by its name."""
    headline: bool = True
    """Whether the console shows it, and result.json has it for the EMA as well."""
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


def top5(logits: Tensor) -> Tensor:
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
    """The average precision of each class, as scikit-learn's `average_precision_score`; None without an image of it.

    Here and below: logits float32 [n, classes], labels bool [n, classes].
    """
    pairs = zip(logits.T, labels.T, strict=True)
    return [_average_precision(scores, truth) if truth.any() else None for scores, truth in pairs]


def mean_average_precision(logits: Tensor, labels: Tensor) -> float:
    """mAP: the mean of the average precision over the classes that an image has; 0 if there is no label at all."""
    return _mean(average_precision_of_classes(logits, labels))


def micro_average_precision(logits: Tensor, labels: Tensor) -> float:
    """The average precision over all pairs of an image and a class together; 0 if there is no label at all."""
    return _average_precision(logits.flatten(), labels.flatten()) if labels.any() else 0.0


def _average_precision(scores: Tensor, truth: Tensor) -> float:
    from sklearn.metrics import average_precision_score  # most runs do not need it

    return float(average_precision_score(truth.numpy(), scores.numpy()))


def _mean(values: list[float | None]) -> float:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else 0.0


METRICS: list[MeanMetric | SplitMetric] = [
    # In training the loss is what the criterion returns (with label smoothing and class weights): see Meter.add.
    MeanMetric(
        "loss",
        ".4f",
        lower_is_better=True,
        predict=same,
        score=partial(F.cross_entropy, reduction="none"),
        training_predict=same,
    ),
    # In evaluation both accuracies come from one topk, so that the first is never above the second.
    MeanMetric("accuracy", predict=top5, score=is_first, training_predict=partial(torch.argmax, dim=1, keepdim=True)),
    top_k("top5_accuracy", 5, headline=False),
    SplitMetric("f1", title="macro F1", headline=False, compute=macro_f1),
]

MULTI_LABEL_METRICS: list[MeanMetric | SplitMetric] = [
    MeanMetric("loss", ".4f", lower_is_better=True, predict=same, score=binary_cross_entropy, training_predict=same),
    SplitMetric("map", title="mean average precision", compute=mean_average_precision),
    SplitMetric("micro_map", title="micro average precision", headline=False, compute=micro_average_precision),
    SplitMetric("f1", title="macro F1", compute=macro_f1),
    SplitMetric("micro_f1", title="micro F1", headline=False, compute=micro_f1),
]

EVALUATE_METRICS = [
    Metric("balanced_accuracy", title="balanced accuracy"),
    Metric("f1", title="f1 (macro)"),
    Metric("precision", title="precision (macro)"),
    Metric("recall", title="recall (macro)"),
    Metric("weighted_precision", title="precision (weighted)"),
    Metric("weighted_recall", title="recall (weighted)"),
    Metric("weighted_f1", title="f1 (weighted)"),
    Metric("calibration_error", title="calibration error", lower_is_better=True),
]
"""What `accel-train evaluate` adds (tools/evaluate_run.py), and what its table calls each."""


def metrics_for(*, multi_label: bool) -> list[MeanMetric | SplitMetric]:
    """The metrics of data whose images have one label each, or (`multi_label`) several or none."""
    return MULTI_LABEL_METRICS if multi_label else METRICS


def training_loss(name: str, *, multi_label: bool) -> str:
    """What the loss of training is called beside that of evaluation; "" if both are of one kind. `name`: --loss.name.

    Evaluation's is the (binary) cross-entropy, whatever was trained with.
    """
    same_kind = name == ("binary_cross_entropy" if multi_label else "cross_entropy")
    return "" if same_kind else f"training loss ({short_name('loss.name', name)})"


def evaluation_metrics(chosen: Sequence[str], *, multi_label: bool) -> list[Metric]:
    """All metrics of an evaluation: those of `metrics_for`, and after them those that are `chosen` by --metrics.

    A chosen one is a headline, also if it is one of the former.
    """
    names = [metric_name(text) for text in chosen]
    table = [
        replace(metric, headline=True, chosen=True) if metric.name in names else metric
        for metric in metrics_for(multi_label=multi_label)
    ]
    known = {metric.name for metric in table}
    return [*table, *(Metric(name, ".4f", chosen=True) for name in names if name not in known)]


def metric_title(name: str) -> str:
    """What reports call a metric, such as "top-5 accuracy" for "top5_accuracy"."""
    titles = {metric.name: metric.title for metric in METRICS + MULTI_LABEL_METRICS}
    return titles.get(name) or name.replace("_", " ")


def mean_metrics(*, multi_label: bool = False) -> list[MeanMetric]:
    """The metrics that are means over samples."""
    return [metric for metric in metrics_for(multi_label=multi_label) if isinstance(metric, MeanMetric)]


def training_metrics(*, multi_label: bool = False) -> list[MeanMetric]:
    """The metrics that are counted while training, the loss first."""
    return [metric for metric in mean_metrics(multi_label=multi_label) if metric.training_predict is not None]


def headlines(figures: Mapping[str, float], chosen: Sequence[str] = ()) -> dict[str, str]:
    """Those of the metrics' values that the console shows, as it shows them: {"accuracy": "97.50%"}.

    `chosen`: by --metrics.
    """
    # Only multi-label data has a mean average precision.
    shown = (metric for metric in evaluation_metrics(chosen, multi_label="map" in figures) if metric.headline)
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
    def without_metrics(
        cls, metrics: Sequence[str], labels: Tensor, classes: int, broken: int, logits: Tensor | None
    ) -> Evaluation:
        """The result for a split with `broken` samples. `metrics`: names. `labels`: int64 [n], or bool [n, classes]."""
        of_classes = ("average_precision", "f1") if labels.ndim == 2 else ("accuracy",)
        return cls(
            dict.fromkeys(metrics, math.nan),
            len(labels),
            {name: [None] * classes for name in of_classes},
            count_classes(labels, classes),
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


def count_classes(labels: Tensor, classes: int) -> list[int]:
    """Of each class: images that have it as a label. `labels`: int64 [n], or bool [n, classes]."""
    images = labels.sum(0) if labels.ndim == 2 else torch.bincount(labels, minlength=classes)
    counts: list[int] = images.tolist()
    return counts


LOWER_IS_BETTER = {metric.name for metric in METRICS + MULTI_LABEL_METRICS if metric.lower_is_better}


def create_own_metrics(texts: Sequence[str], accelerator: Accelerator, splits: Splits) -> OwnMetrics | None:
    """The metrics `texts` of --metrics; None if they all are in every evaluation. Collective.

    Each metric is tried with made-up logits. Raises UserError if one cannot be used.
    """
    objects = given_metrics()
    if taken := TAKEN_NAMES & objects.keys():
        raise UserError(
            f"--metrics {', '.join(sorted(taken))}: a built-in figure has this name; give yours another one."
        )
    built_in = {metric.name for metric in metrics_for(multi_label=splits.multi_label)}
    texts = [text for text in texts if text not in built_in]
    if not texts:
        return None
    metrics: list[OwnMetric] = []

    def create() -> frozenset[str]:
        for text in texts:
            metrics.append(_create(text, objects.get(text), len(splits.classes), multi_label=splits.multi_label))
        return frozenset(LOWER_IS_BETTER) | {metric.name for metric in metrics if metric.lower_is_better}

    return OwnMetrics(accelerator, metrics, broadcast_from_main(accelerator, create))


def _create(text: str, given: Callable[..., Any] | None, classes: int, *, multi_label: bool) -> OwnMetric:
    reference = parse_reference("metrics", text)
    if reference is None and given is None:
        raise UserError(f"--metrics {text}: no metric of this package, and not given as an object of Python.")
    if reference is None:
        reference = Reference(_source_file(given), "", text)
    target: Any = load("metrics", reference) if given is None else given
    if isinstance(target, type):
        taken = {"num_classes", "num_labels"} & inspect.signature(target).parameters.keys()
        target = call("metrics", reference, target, dict.fromkeys(taken, classes), {})
    if isinstance(target, nn.Module):
        for part in target.cpu().modules():
            if hasattr(part, "distributed_available_fn"):  # of torchmetrics: one process has all samples already
                part.distributed_available_fn = lambda: False  # type: ignore[assignment]
    metric = OwnMetric(metric_name(text), reference, target, getattr(target, "higher_is_better", None) is False)
    if not (metric.accumulates or callable(target)):
        raise metric.wrong(target, "a function of (logits, targets), or an object with reset, update and compute")
    with torch.inference_mode():
        metric.try_once(classes, multi_label=multi_label)
    return metric


def _source_file(given: Any) -> str:
    """The file of an object's code, for messages."""
    try:
        has_code = inspect.isroutine(given) or inspect.isclass(given)
        return inspect.getsourcefile(given if has_code else type(given)) or "Python"
    except TypeError:
        return "Python"


@dataclass(frozen=True)
class OwnMetric:
    """A metric of --metrics, on the main process."""

    name: str
    reference: Reference
    target: Any
    """A function of (logits, targets), or an object with `reset`, `update` of the same, and `compute`."""
    lower_is_better: bool

    @property
    def accumulates(self) -> bool:
        return all(hasattr(self.target, name) for name in ("reset", "update", "compute"))

    def __call__(self, logits: Tensor, targets: Tensor) -> float:
        """The figure of a whole split. Raises UserError if the user's code fails or returns not one number."""
        with showing_user_lines("metrics", self.reference), one_thread():
            if self.accumulates:
                self.target.reset()
                self.target.update(logits, targets)
                value = self.target.compute()
            else:
                value = self.target(logits, targets)
        found = as_numbers(value)
        if found is None or found.numel() != 1:
            raise self.wrong(value, "one number" + ", as with average='macro'" * hasattr(self.target, "average"))
        return float(found)

    def wrong(self, value: Any, expected: str) -> UserError:
        found = as_numbers(value)
        kind = f"a {type(value).__name__}"
        if found is not None and found.ndim:
            kind = f"{str(found.dtype)[6:]} {list(found.shape)}"
        return UserError(f"--metrics {self.reference.short}: returned {kind}; expected {expected}.")

    def try_once(self, classes: int, *, multi_label: bool) -> None:
        """Try it with made-up logits in which each class has samples. Raises UserError."""
        samples = 2 * classes if classes <= 1000 else 1000  # another number than that of the classes
        logits = torch.randn(samples, classes, generator=torch.Generator().manual_seed(0))
        targets = torch.arange(samples) % classes
        if multi_label:
            targets = ((targets[:, None] + torch.arange(classes)) % 2) if classes > 1 else targets[:, None]
        self(logits, targets)


class OwnMetrics:
    """The metrics of --metrics. All processes have one, and make the same calls."""

    def __init__(self, accelerator: Accelerator, metrics: Sequence[OwnMetric], lower_is_better: frozenset[str]) -> None:
        """`metrics`: on the main process; others have none. `lower_is_better`: their names, and the built-in ones'."""
        self.accelerator, self.metrics, self.lower_is_better = accelerator, metrics, lower_is_better

    def figures(self, logits: Tensor | None, labels: Tensor, *, broken: bool) -> dict[str, float]:
        """The figures of a split, on all processes; NaN if its logits are `broken`, that is, some are no numbers.

        `logits`: float32 [n, classes], needed on the main process alone. `labels`: int64 [n], or bool [n, classes].
        Raises MetricError on all processes if a metric fails.
        """

        def compute() -> dict[str, float]:
            if broken or logits is None:
                return {metric.name: math.nan for metric in self.metrics}
            return {metric.name: metric(logits, labels.long()) for metric in self.metrics}

        try:
            return broadcast_from_main(self.accelerator, compute)
        except UserError as error:
            raise MetricError(*error.messages) from error


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums of torch have other last bits with another number of threads, and launchers set different ones."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def as_numbers(value: Any) -> Tensor | None:
    """The real number or numbers that a metric has returned; None if it has returned something else."""
    if isinstance(value, (bool, int, float, np.generic, np.ndarray)) and np.asarray(value).dtype.kind in "biuf":
        return torch.from_numpy(np.asarray(value, np.float64))
    return value if isinstance(value, Tensor) and not value.is_complex() else None
