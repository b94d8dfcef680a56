"""The results of an evaluation, and the metrics of --metrics. The built-in metrics are those of the task: `task.py`.

The main process computes the metrics of --metrics, a user's functions of logits and targets, on its CPU, for the logits
of a whole split, which it gets from all processes, in the order of the samples' numbers: so their bits do not depend on
the number of processes. Only the main process imports the code, and tries each metric with made-up logits.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.config.declaration import TAKEN_NAMES
from accel_train.data.sources.splits import Splits
from accel_train.errors import EvaluationError, UserError
from accel_train.launch.agreement import broadcast_from_main
from accel_train.task import LOWER_IS_BETTER, Task
from accel_train.user_code import Reference, given_metrics, load, metric_name, parse_reference, showing_user_lines


@dataclass(frozen=True)
class Evaluation:
    """The results of a model on one split. Fractions are from 0 to 1."""

    metrics: dict[str, float]
    """By name. The loss is the cross-entropy, or with several labels an image the binary cross-entropy, without label
    smoothing and class weights."""
    count: int
    """Samples of the split."""
    class_metrics: dict[str, list[float | None]]
    """Those of each class, by name; None where it has no image. One label an image: "accuracy"; several:
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
    metrics are NaN, and those of the classes None."""

    def value_to_choose_by(self, metric: str) -> float:
        """The value that decides about the best checkpoint, the plateau schedule and the patience.

        NaN if the loss is not finite, whatever the metric is: the accuracy of such outputs may be high by chance, and
        would stay the best.
        """
        return self.metrics[metric] if math.isfinite(self.metrics["loss"]) else math.nan

    def warning(self, name: str) -> str | None:
        """A sentence about the evaluation `name` if it has no metrics, else None."""
        if not self.broken:
            return None
        return (
            f"{name}: the model's output is NaN or infinite for {self.broken:,} of {self.count:,} images, so there are "
            "no metrics"
        )

    def as_record(self) -> dict[str, Any]:
        """The metrics of the classes as result.json and evaluation-SPLIT.json have them."""
        record: dict[str, Any] = {f"class_{name}": values for name, values in self.class_metrics.items()}
        return record | ({"class_images": self.images} if self.confusion is None else {"confusion": self.confusion})


def create_own_metrics(texts: Sequence[str], accelerator: Accelerator, splits: Splits) -> OwnMetrics | None:
    """The metrics `texts` of --metrics; None if there are none. Collective.

    Each metric is tried with made-up logits. Raises UserError if one cannot be used.
    """
    objects = given_metrics()
    if taken := TAKEN_NAMES & objects.keys():
        raise UserError(
            f"--metrics {', '.join(sorted(taken))}: a built-in metric has this name; give yours another one."
        )
    if not texts:
        return None
    metrics: list[OwnMetric] = []

    def create() -> frozenset[str]:
        for text in texts:
            metrics.append(_create(text, objects.get(text), len(splits.classes), splits.task))
        return frozenset(LOWER_IS_BETTER) | {metric.name for metric in metrics if metric.lower_is_better}

    return OwnMetrics(accelerator, metrics, broadcast_from_main(accelerator, create))


def _create(text: str, given: Callable[..., Any] | None, classes: int, task: Task) -> OwnMetric:
    reference = parse_reference("metrics", text)
    if reference is None and given is None:
        raise UserError(f"--metrics {text}: expected FILE.py:NAME, or a function that is given from Python.")
    if reference is None:
        reference = Reference(_source_file(given), "", text)
    target: Any = load("metrics", reference) if given is None else given
    if not callable(target) or isinstance(target, (type, nn.Module)):
        raise UserError(
            f"--metrics {reference.short}: found an object of type {type(target).__name__}; expected a function of "
            "(logits, targets), such as those of torchmetrics.functional."
        )
    metric = OwnMetric(metric_name(text), reference, target, getattr(target, "higher_is_better", None) is False)
    samples = 2 * classes if classes <= 1000 else 1000  # another number than that of the classes
    with torch.inference_mode():
        logits = torch.randn(samples, classes, generator=torch.Generator().manual_seed(0))
        metric(logits, task.example_targets(samples, classes).long())
    return metric


def _source_file(given: Any) -> str:
    """The file of an object's code, for messages."""
    try:
        return inspect.getsourcefile(given if inspect.isroutine(given) else type(given)) or "Python"
    except TypeError:
        return "Python"


@dataclass(frozen=True)
class OwnMetric:
    """A metric of --metrics, on the main process."""

    name: str
    reference: Reference
    function: Callable[[Tensor, Tensor], Any]
    """Of (logits, targets)."""
    lower_is_better: bool

    def __call__(self, logits: Tensor, targets: Tensor) -> float:
        """The metric of a whole split. Raises UserError if the user's code fails or returns not one number."""
        with showing_user_lines("metrics", self.reference), one_thread():
            value = self.function(logits, targets)
        found = as_numbers(value)
        if found is None or found.numel() != 1:
            kind = f"a {type(value).__name__}" if found is None else f"{str(found.dtype)[6:]} {list(found.shape)}"
            raise UserError(f"--metrics {self.reference.short}: returned {kind}; expected one number.")
        return float(found)


class OwnMetrics:
    """The metrics of --metrics. All processes have one, and make the same calls."""

    def __init__(self, accelerator: Accelerator, metrics: Sequence[OwnMetric], lower_is_better: frozenset[str]) -> None:
        """`metrics`: on the main process; others have none. `lower_is_better`: their names, and the built-in ones'."""
        self.accelerator, self.metrics, self.lower_is_better = accelerator, metrics, lower_is_better

    def compute(self, logits: Tensor | None, labels: Tensor, *, broken: bool) -> dict[str, float]:
        """The metrics of a split, on all processes; NaN if its logits are `broken`, that is, some are no numbers.

        `logits`: float32 [n, classes], needed on the main process alone. `labels`: int64 [n], or bool [n, classes].
        Raises EvaluationError on all processes if a metric fails.
        """

        def on_main() -> dict[str, float]:
            if broken or logits is None:
                return {metric.name: math.nan for metric in self.metrics}
            return {metric.name: metric(logits, labels.long()) for metric in self.metrics}

        try:
            return broadcast_from_main(self.accelerator, on_main)
        except UserError as error:
            raise EvaluationError(*error.messages) from error


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
