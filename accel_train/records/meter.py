"""The metrics of training: summed on the device, and read by the host only when a log line is due."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from accel_train.task import Task

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Sums:
    """The sum of each metric over so many samples, of all processes together."""

    totals: dict[str, float]
    samples: int

    @property
    def means(self) -> dict[str, float]:
        return {name: total / self.samples if self.samples else math.nan for name, total in self.totals.items()}


class Meter:
    """Sums the metrics of this process's samples on the device; `reduce` adds those of all processes and starts at 0.

    Micro-batches count once their update is done: `commit` them, or `discard` them if the update is skipped. Many
    committed micro-batches are summed at once: a dozen small kernels for each would cost more than their work.
    """

    FLUSH_EVERY = 64  # micro-batches
    STEPS = 2.0**30  # of a sum of floats: whole numbers of 1e-9 have the same sum in any order

    def __init__(self, accelerator: Accelerator, task: Task) -> None:
        self.accelerator, self._task = accelerator, task
        self._metrics = [metric for metric in task.training_metrics if metric.name != "loss"]
        # Float sums: of the loss, and of each metric whose values are floats. Integer sums: of each metric whose values
        # are bools, and last the number of samples. Unused places stay 0.
        # They are in steps of 1/STEPS where the device has float64.
        self._dtype = torch.float32 if accelerator.device.type == "mps" else torch.float64
        self._floats = torch.zeros(1 + len(self._metrics), dtype=self._dtype, device=accelerator.device)
        self._integers = torch.zeros(len(self._metrics) + 1, dtype=torch.int64, device=accelerator.device)
        # Losses, weights and labels [b] of a micro-batch, then what each metric needs of its logits [b, ...].
        self._update: list[tuple[Tensor, ...]] = []
        self._committed: list[tuple[Tensor, ...]] = []

    @torch.no_grad()
    def add(self, logits: Tensor, targets: Tensor, weighted_losses: Tensor, weights: Tensor) -> None:
        """Add a micro-batch of the current update.

        `logits` [b, classes]; `targets`: of the loss, see `Task.labels_of`; `weights` float32 [b], 0 for padding;
        `weighted_losses` float32 [b]: the criterion's losses times `weights`.
        """
        predictions = (metric.training_predict(logits) for metric in self._metrics if metric.training_predict)
        self._update.append((weighted_losses, weights, self._task.labels_of(targets), *predictions))

    def commit(self) -> None:
        """The update is done: its micro-batches count."""
        self._committed += self._update
        self._update.clear()
        if len(self._committed) >= self.FLUSH_EVERY:
            self._sum()

    def discard(self) -> None:
        """The update is skipped: its micro-batches do not count."""
        self._update.clear()

    def _sum(self) -> None:
        if not self._committed:
            return
        losses, weights, labels, *predictions = (torch.cat(values) for values in zip(*self._committed, strict=True))
        self._committed.clear()
        real = weights > 0
        self._floats[0].add_(self._rounded(losses).sum())  # `+=` would copy the sum onto itself afterwards
        self._integers[-1].add_(real.sum())
        for number, (metric, predicted) in enumerate(zip(self._metrics, predictions, strict=True)):
            scores = metric.score(predicted, labels)
            if scores.is_floating_point():
                self._floats[1 + number].add_(torch.where(real, self._rounded(scores), 0.0).sum())
            else:
                self._integers[number].add_((scores & real).sum())

    def _rounded(self, values: Tensor) -> Tensor:
        return (values.to(self._dtype) * self.STEPS).round_()

    def reduce(self) -> Sums:
        """The sums since the last `reduce`, over all processes (which must all call it). Waits for the device."""
        self._sum()
        floats, integers = self.accelerator.reduce([self._floats, self._integers], reduction="sum")
        self._floats.zero_()
        self._integers.zero_()
        loss, *real_sums = (total / self.STEPS for total in floats.tolist())
        *counts, samples = integers.tolist()
        # One of a metric's two sums is always 0. A count stays an integer.
        totals = {
            metric.name: real_sum or count
            for metric, count, real_sum in zip(self._metrics, counts, real_sums, strict=True)
        }
        return Sums({"loss": loss, **totals}, samples)


class Stopwatch:
    """Measures the time of training, the samples trained in it, and the time spent waiting for data.

    It is paused between `stop` and `start`. The first update of each start is left out: it compiles, searches for the
    fastest kernels and starts workers, which would dominate the speed of a short run.
    """

    def __init__(self, seconds: float = 0.0, samples: int = 0) -> None:
        self.seconds, self.samples = seconds, samples
        self.waiting = 0.0
        self.warm_up: float | None = None  # seconds of the first update, once it is done
        self._since: float | None = None
        self._read = seconds, samples, 0.0  # at the last `speed`

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self.lap()
        self._since = None

    def lap(self) -> float:
        """Add the time until now to `seconds` and return the sum."""
        if self._since is not None:
            now = time.perf_counter()
            self.seconds += now - self._since
            self._since = now
        return self.seconds

    def speed(self, sums: Sums) -> tuple[float, dict[str, float]]:
        """The seconds of training since the last call, and its images a second and part of waiting for data (0 to 1).

        `sums`: of the updates since then.
        """
        before, self._read = self._read, (self.lap(), self.samples, self.waiting)
        seconds, samples, waiting = (now - then for now, then in zip(self._read, before, strict=True))
        if samples == 0 and self.warm_up:  # the first update alone, which is left out: there is no other speed yet
            seconds, samples = self.warm_up, sums.samples
        at_least = max(seconds, 1e-9)
        return seconds, {"images_per_second": samples / at_least, "data_wait_fraction": min(1.0, waiting / at_least)}

    def trained(self, samples: int) -> None:
        """Count an update of so many samples."""
        if self.warm_up is not None:
            self.samples += samples
            return
        before = self.seconds
        self.warm_up = self.lap() - before
        self.seconds, self.waiting = before, 0.0

    def timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the same batches, and count the time until each one arrives as waiting."""
        before = time.perf_counter()
        for batch in batches:
            self.waiting += time.perf_counter() - before
            yield batch
            before = time.perf_counter()


class Pace:
    """Counts updates, and says how long the rest will take."""

    def __init__(self, total_updates: int, first_update: int = 0) -> None:
        """`first_update`: updates done by earlier starts of the run. Whoever counts sets `update`."""
        self.total_updates, self.update = total_updates, first_update
        self._first_update = first_update
        self._since: tuple[float, int] | None = None  # time and update from which the speed is computed

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to the end at the mean speed since the first update of this start, evaluations included.

        None until there is a speed.
        """
        if self._since is None:
            if self.update > self._first_update:
                self._since = (time.monotonic(), self.update)
            return None
        since, update = self._since
        if self.update <= update:
            return None
        return (time.monotonic() - since) / (self.update - update) * (self.total_updates - self.update)
