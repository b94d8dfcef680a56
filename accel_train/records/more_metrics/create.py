"""Loads the metrics that --metrics names, and tries each with made-up logits. The main process does it, for all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.config.declaration import NAMES_OF_FIGURES
from accel_train.data.sources.splits import Splits
from accel_train.errors import UserError
from accel_train.launch.agreement import broadcast_from_main
from accel_train.records.metrics import LOWER_IS_BETTER, metrics_for
from accel_train.records.more_metrics.own import MOST_BYTES, Kind, OwnMetric, OwnMetrics, as_numbers
from accel_train.records.more_metrics.ranking import auroc
from accel_train.user_code.loading import call, load
from accel_train.user_code.reference import CHOSEN_METRICS, Reference, given_metrics, metric_name, parse_reference


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
        lower = set(LOWER_IS_BETTER)
        for text in texts:
            metric = _create(text, objects.get(text), classes, multi_label=multi_label)
            needed = samples * classes * (12 if multi_label else 4)  # logits float32, and targets int64
            if metric.kind == "whole split" and needed > MOST_BYTES:
                raise UserError(
                    f"--metrics {metric.reference.short}: a function of a whole split needs the results of its "
                    f"{samples:,} images at once, {needed / 2**30:.1f} GiB; at most {MOST_BYTES >> 30} GiB are kept. "
                    "Return a number for each sample, or use a metric that accumulates (reset, update, compute), as "
                    "those of torchmetrics do."
                )
            metrics.append(metric)
            if metric.lower_is_better:
                lower.add(metric.name)
        return frozenset(lower)

    return OwnMetrics(accelerator, metrics, broadcast_from_main(accelerator, create))


def _create(text: str, given: Callable[..., Any] | None, classes: int, *, multi_label: bool) -> OwnMetric:
    reference = parse_reference("metrics", text)
    if text == "auroc":
        return OwnMetric(text, Reference("", __name__, text), auroc, "whole split", lower_is_better=False)
    if reference is None and given is None:
        raise UserError(f"--metrics {text}: no metric of this package, and not given as an object of Python.")
    if reference is None:
        reference = Reference(_source_file(given), "", text)
    target: Any = load("metrics", reference) if given is None else given
    higher = getattr(target, "higher_is_better", None)
    if _makes_metric(target):
        taken = {"num_classes", "num_labels"} & inspect.signature(target).parameters.keys()
        target = call("metrics", reference, target, dict.fromkeys(taken, classes), {})
        higher = getattr(target, "higher_is_better", None) if higher is None else higher
    if isinstance(target, nn.Module):
        for part in target.cpu().modules():
            if hasattr(part, "distributed_available_fn"):  # of torchmetrics: one process has all samples already
                part.distributed_available_fn = lambda: False  # type: ignore[assignment]
    if type(target).__module__.startswith("torchmetrics.") and type(target).__name__.startswith("Binary"):
        if classes != 2 or multi_label:
            name = type(target).__name__
            raise UserError(
                f"--metrics {text}: {name} needs data with two classes and one label an image; this data has {classes} "
                f"classes. Take {name.replace('Binary', 'Multilabel' if multi_label else 'Multiclass')}."
            )
        target = _Binary(target)
    accumulates = all(hasattr(target, name) for name in ("reset", "update", "compute"))
    kind: Kind = "accumulating" if accumulates else "whole split"
    metric = OwnMetric(metric_name(text), reference, target, kind, lower_is_better=higher is False)
    with torch.inference_mode():
        return _tried(metric, classes, multi_label=multi_label)


class _Binary:
    """A binary metric of torchmetrics, which gets the probability of the second class."""

    def __init__(self, metric: Any) -> None:
        self.reset, self.compute, self._update = metric.reset, metric.compute, metric.update

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self._update(logits.softmax(1)[:, 1], targets)


def _source_file(given: Any) -> str:
    """The file of an object's code, for messages."""
    try:
        has_code = inspect.isroutine(given) or inspect.isclass(given)
        return inspect.getsourcefile(given if has_code else type(given)) or "Python"
    except TypeError:
        return "Python"


def _makes_metric(target: Any) -> bool:
    """Whether it is a class, or a function that makes a metric: one that needs no logits and targets."""
    if isinstance(target, type):
        return True
    if hasattr(target, "update"):
        return False
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # some callables of C have none
        return False
    takes_words = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    needed = {each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD}
    return not takes_words and needed <= {"num_classes", "num_labels"}


def _tried(metric: OwnMetric, classes: int, *, multi_label: bool) -> OwnMetric:
    """Try the metric with made-up logits in which each class has samples. Returns it with its kind.

    Raises UserError if it fails, or returns neither one number nor a number for each sample.
    """
    samples = 2 * classes if classes <= 1000 else 1000  # another number than that of the classes
    logits = torch.randn(samples, classes, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(samples) % classes
    if multi_label:
        targets = ((targets[:, None] + torch.arange(classes)) % 2) if classes > 1 else targets[:, None]
    if metric.kind == "accumulating":
        metric.target.reset()
        metric.call(metric.target.update, logits, targets)
        metric.number(metric.call(metric.target.compute))
        return metric
    if not callable(metric.target):
        raise metric.wrong(
            metric.target, "a function of (logits, targets), or an object with reset, update and compute"
        )
    value = metric.call(metric.target, logits, targets)
    found = as_numbers(value)
    if found is None or (found.numel() != 1 and found.shape != (samples,)):
        raise metric.wrong(
            value,
            f"one number, or a number for each sample, [{samples}], for the logits of {samples} samples and {classes} "
            "classes",
        )
    if found.numel() == 1:
        return metric
    metric = replace(metric, kind="each sample")
    halves = [metric.of_each(*part) for part in zip(logits.chunk(2), targets.chunk(2), strict=True)]
    if not torch.allclose(found.double(), torch.cat(halves), rtol=1e-4, atol=1e-6, equal_nan=True):
        raise UserError(
            f"--metrics {metric.reference.short}: the number of a sample depends on the other samples beside it. "
            "Compute each sample's from its own logits, or return one number of all samples."
        )
    return metric
