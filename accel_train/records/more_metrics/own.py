"""The metrics of --metrics: a user's functions of logits and targets, metrics of torchmetrics, and AUROC.

The main process computes them, on its CPU, for the logits that it gets from all processes, in the order of the samples'
numbers and in pieces of CHUNK samples: so their bits do not depend on the number of processes. Only the main process
imports the code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from accel_train.errors import MetricError, UserError
from accel_train.launch.agreement import broadcast_from_main
from accel_train.user_code.loading import showing_user_lines
from accel_train.user_code.reference import Reference

CHUNK = 4096
"""Samples of which a function of each sample, or `update`, gets the logits at once. With another number the sums of a
metric may have other last bits."""
MOST_BYTES = 4 << 30
"""Of logits (and targets [n, classes]) that are kept for a function of a whole split."""
Kind = Literal["each sample", "whole split", "accumulating"]


@dataclass(frozen=True)
class OwnMetric:
    """A metric that was tried with made-up logits."""

    name: str
    reference: Reference
    target: Any
    """A function of (logits, targets); of the accumulating kind an object with `reset`, `update` and `compute`."""
    kind: Kind
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

    def of_each(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The numbers of the samples, float64 [n]. Raises UserError if the function returns something else."""
        value = self.call(self.target, logits, targets)
        found = as_numbers(value)
        if found is None or found.shape != targets.shape[:1]:
            raise self.wrong(value, f"a number for each sample, [{len(targets)}], as in the trial at the start")
        return found.double()

    def wrong(self, value: Any, expected: str) -> UserError:
        found = as_numbers(value)
        kind = f"a {type(value).__name__}"
        if found is not None and found.ndim:
            kind = f"{str(found.dtype)[6:]} {list(found.shape)}"
        return UserError(f"--metrics {self.reference.short}: returned {kind}; expected {expected}.")


class OwnMetrics:
    """The metrics of --metrics, over one evaluation after another. All processes have one, and make the same calls."""

    def __init__(self, accelerator: Accelerator, metrics: Sequence[OwnMetric], lower_is_better: frozenset[str]) -> None:
        """`metrics`: on the main process; others have none. `lower_is_better`: their names, and the built-in ones'."""
        self.accelerator, self.metrics, self.lower_is_better = accelerator, metrics, lower_is_better
        self._keeps_all = any(metric.kind == "whole split" for metric in metrics)

    def begin(self, samples: int) -> None:
        """Begin the evaluation of a split with so many samples."""
        self._samples, self._added, self._waiting = samples, 0, 0
        self._pieces: list[tuple[Tensor, Tensor]] = []  # those whose samples are not a whole CHUNK yet
        self._all: list[Tensor] = []  # logits and targets, if a function takes the whole split
        self._values: dict[str, list[float]] = {each.name: [] for each in self.metrics if each.kind == "each sample"}
        self._error: UserError | None = None
        self._broken = False
        try:
            for metric in self.metrics:
                if metric.kind == "accumulating":
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
                if metric.kind == "accumulating":
                    metric.call(metric.target.update, logits, targets)
                elif metric.kind == "each sample":
                    self._values[metric.name] += metric.of_each(logits, targets).tolist()

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
            self._all, self._values = [], {}

    def _value(self, metric: OwnMetric) -> float:
        if metric.kind == "each sample":
            return math.fsum(self._values[metric.name]) / self._samples  # fsum: the same in any order
        if metric.kind == "accumulating":
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
