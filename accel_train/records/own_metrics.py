"""The metrics of --metrics: a user's functions of logits and targets, metrics of torchmetrics, and AUROC.

The main process computes them, on its CPU, for the logits that it gets from all processes, in the order of the samples'
numbers and in pieces of CHUNK samples: so their bits do not depend on the number of processes. Only the main process
imports the code, and tries each metric with made-up logits.
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

from accel_train.config.declaration import NAMES_OF_FIGURES
from accel_train.data.sources.splits import Splits
from accel_train.errors import MetricError, UserError
from accel_train.launch.agreement import broadcast_from_main
from accel_train.records.metrics import LOWER_IS_BETTER, metrics_for
from accel_train.user_code.loading import call, load, showing_user_lines
from accel_train.user_code.reference import CHOSEN_METRICS, Reference, given_metrics, metric_name, parse_reference

CHUNK = 4096
"""Samples of which `update` gets the logits at once. With another number the sums of a metric may have other last
bits."""
MOST_BYTES = 4 << 30
"""Of logits (and targets [n, classes]) that are kept for a function of a whole split."""


def create_own_metrics(
    texts: Sequence[str],
    accelerator: Accelerator,
    splits: Splits,
    samples: int,
) -> OwnMetrics | None:
    """The metrics `texts` of --metrics; None if they all are in every evaluation. Collective.

    `samples`: of the largest split that is evaluated. Each metric is tried with made-up logits. Raises UserError if one
    cannot be used.
    """
    classes, multi_label = len(splits.classes), splits.multi_label
    objects = given_metrics()
    if taken := (NAMES_OF_FIGURES | set(CHOSEN_METRICS)) & objects.keys():
        raise UserError(
            f"--metrics {', '.join(sorted(taken))}: a built-in figure has this name; give yours another one."
        )
    built_in = {metric.name for metric in metrics_for(multi_label=multi_label)}
    texts = [text for text in texts if text not in built_in]
    if not texts:
        return None
    metrics: list[OwnMetric] = []

    def create() -> frozenset[str]:
        for text in texts:
            metric = _create(text, objects.get(text), classes, multi_label=multi_label)
            needed = samples * classes * (12 if multi_label else 4)  # logits float32, and targets int64
            if not metric.accumulates and needed > MOST_BYTES:
                raise UserError(
                    f"--metrics {metric.reference.short}: a function needs the results of all {samples:,} images of a "
                    f"split at once, {needed / 2**30:.1f} GiB; at most {MOST_BYTES >> 30} GiB are kept. Use a metric "
                    "that accumulates (reset, update, compute), as those of torchmetrics do."
                )
            metrics.append(metric)
        return frozenset(LOWER_IS_BETTER) | {metric.name for metric in metrics if metric.lower_is_better}

    return OwnMetrics(accelerator, metrics, broadcast_from_main(accelerator, create))


def _create(text: str, given: Callable[..., Any] | None, classes: int, *, multi_label: bool) -> OwnMetric:
    reference = parse_reference("metrics", text)
    if text == "auroc":
        return OwnMetric(text, Reference("", __name__, text), auroc, accumulates=False, lower_is_better=False)
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
    accumulates = all(hasattr(target, name) for name in ("reset", "update", "compute"))
    lower = getattr(target, "higher_is_better", None) is False
    metric = OwnMetric(metric_name(text), reference, target, accumulates, lower)
    if not (accumulates or callable(target)):
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
    """A function of (logits, targets) of a whole split; or, if it accumulates, an object with `reset`, `update` and
    `compute`."""
    accumulates: bool
    lower_is_better: bool

    def call(self, function: Callable[..., Any], *arguments: Tensor) -> Any:
        with showing_user_lines("metrics", self.reference):
            return function(*arguments)

    def number(self, value: Any) -> float:
        """The value of a whole split. Raises UserError if it is not one number."""
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
        if self.accumulates:
            self.target.reset()
            self.call(self.target.update, logits, targets)
            self.number(self.call(self.target.compute))
        else:
            self.number(self.call(self.target, logits, targets))


class OwnMetrics:
    """The metrics of --metrics, over one evaluation after another. All processes have one, and make the same calls."""

    def __init__(self, accelerator: Accelerator, metrics: Sequence[OwnMetric], lower_is_better: frozenset[str]) -> None:
        """`metrics`: on the main process; others have none. `lower_is_better`: their names, and the built-in ones'."""
        self.accelerator, self.metrics, self.lower_is_better = accelerator, metrics, lower_is_better
        self._keeps_all = not all(metric.accumulates for metric in metrics)

    def begin(self, samples: int) -> None:
        """Begin the evaluation of a split with so many samples."""
        self._samples, self._added, self._waiting = samples, 0, 0
        self._pieces: list[tuple[Tensor, Tensor]] = []  # those whose samples are not a whole CHUNK yet
        self._all: list[Tensor] = []  # logits and targets, if a function takes the whole split
        self._error: UserError | None = None
        self._broken = False
        try:
            for metric in self.metrics:
                if metric.accumulates:
                    metric.call(metric.target.reset)
        except UserError as error:
            self._error = error

    def add(self, ids: Tensor, labels: Tensor, logits: Tensor) -> None:
        """Add a batch of all processes on the main process: the next samples. One with the id -1 is padding.

        Errors wait for `finish`: the other processes are still busy.
        """
        ids = ids.cpu()
        order = ids.argsort()
        order = order[ids[order] >= 0]
        if not torch.equal(ids[order], torch.arange(self._added, self._added + len(order))):
            raise RuntimeError(f"evaluation has samples {ids[order].tolist()[:5]} … after {self._added} samples")
        self._added += len(order)
        targets, logits = labels.cpu()[order].long(), logits.cpu()[order]
        # No metric gets what is not a number; evaluate() finds the same, and that there are no figures.
        self._broken |= not bool((logits.isfinite() if targets.ndim == 2 else logits < math.inf).all())
        if self._broken or self._error is not None:
            return
        self._pieces.append((logits, targets))
        self._waiting += len(targets)
        try:
            while self._waiting >= CHUNK or (self._waiting and self._added == self._samples):
                self._take_chunk()
        except UserError as error:
            self._error = error

    def _take_chunk(self) -> None:
        logits, targets = (torch.cat(parts) for parts in zip(*self._pieces, strict=True))
        self._pieces = [(logits[CHUNK:], targets[CHUNK:])]
        logits, targets = logits[:CHUNK], targets[:CHUNK]
        if self._keeps_all:
            if not self._all:
                self._all = [part.new_empty((self._samples, *part.shape[1:])) for part in (logits, targets)]
            first = self._added - self._waiting
            for whole, part in zip(self._all, (logits, targets), strict=True):
                whole[first : first + len(part)] = part
        self._waiting -= len(targets)
        with one_thread():
            for metric in self.metrics:
                if metric.accumulates:
                    metric.call(metric.target.update, logits, targets)

    def finish(self) -> dict[str, float]:
        """The figures of the split, on all processes. Raises MetricError on all of them if a metric has failed."""

        def figures() -> dict[str, float]:
            if self._error is not None:
                raise self._error
            with one_thread():
                return {metric.name: math.nan if self._broken else self._value(metric) for metric in self.metrics}

        try:
            return broadcast_from_main(self.accelerator, figures)
        except UserError as error:
            raise MetricError(*error.messages) from error
        finally:
            self._all = []

    def _value(self, metric: OwnMetric) -> float:
        if metric.accumulates:
            return metric.number(metric.call(metric.target.compute))
        return metric.number(metric.call(metric.target, *self._all))


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


def auroc(logits: Tensor, targets: Tensor) -> float:
    """The area under the ROC curve, as scikit-learn's `roc_auc_score`: logits float32 [n, classes], targets int64 [n],
    or [n, classes] of 0 and 1.

    Of two classes that of the second. Of more, each class against all others by its probability, and of images with
    several labels by its logit; then the mean over the classes. A class that no image has, or that all have, has no
    such area and is left out of the mean. NaN if that is so of all.
    """
    scores, labels = logits.double(), targets.numpy()
    if targets.ndim == 1:
        scores = scores.softmax(1)
        labels = labels[:, None] == np.arange(logits.shape[1])
        if logits.shape[1] == 2:
            scores, labels = scores[:, 1:], labels[:, 1:]
    from sklearn.metrics import roc_auc_score

    pairs = zip(scores.numpy().T, labels.T.astype(bool), strict=True)
    areas = [float(roc_auc_score(truth, values)) for values, truth in pairs if truth.any() and not truth.all()]
    return math.fsum(areas) / len(areas) if areas else math.nan
