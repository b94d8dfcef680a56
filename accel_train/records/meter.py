"""Counting while training: sums on the device, read by the host only when a line is due."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Count:
    """Sums over samples of all processes."""

    loss_sum: float = 0.0
    correct: int = 0
    samples: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.loss_sum + other.loss_sum, self.correct + other.correct, self.samples + other.samples)

    @property
    def loss(self) -> float:
        return self.loss_sum / self.samples if self.samples else math.nan

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples if self.samples else math.nan


class Meter:
    """Sums this process's losses and hits on the device; `read` adds up all processes' and starts anew.

    An update's micro-batches count once it is done: `keep` them, or `drop` them if the update is left out. What is kept
    is summed for many micro-batches at once: a dozen small operations of each would take longer than they have work.
    """

    AT_ONCE = 64  # micro-batches

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._losses = torch.zeros((), device=accelerator.device)
        self._counts = torch.zeros(2, dtype=torch.int64, device=accelerator.device)  # hits, samples
        # Predictions, labels, losses and weights [b] of each micro-batch: of the update under way, and of those done.
        self._update: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    @torch.no_grad()
    def add(self, logits: Tensor, targets: Tensor, weighted_losses: Tensor, weights: Tensor) -> None:
        """`logits` [b, classes]; `targets` labels int64 [b] or shares [b, classes], of which the largest counts as
        the label; `weighted_losses` float32 [b], already times `weights`; `weights` float32 [b], 0 for padding."""
        labels = targets if targets.ndim == 1 else targets.argmax(1)
        self._update.append((logits.argmax(1), labels, weighted_losses, weights))

    def keep(self) -> None:
        """The update is done: its micro-batches count."""
        self._kept += self._update
        self._update.clear()
        if len(self._kept) >= self.AT_ONCE:
            self._sum()

    def drop(self) -> None:
        """The update is left out: its micro-batches do not count."""
        self._update.clear()

    def _sum(self) -> None:
        if not self._kept:
            return
        predictions, labels, losses, weights = (torch.cat(values) for values in zip(*self._kept, strict=True))
        self._kept.clear()
        real = weights > 0
        self._losses += losses.sum()
        self._counts += torch.stack([((predictions == labels) & real).sum(), real.sum()])

    def read(self) -> Count:
        """The sums since the last `read`, over all processes (which must all call it). Waits for the device."""
        self._sum()
        losses, counts = self.accelerator.reduce([self._losses, self._counts], reduction="sum")
        count = Count(losses.item(), *counts.tolist())
        self._losses.zero_()
        self._counts.zero_()
        return count


class Stopwatch:
    """Time of training, the samples trained in it, and the share of it that went by waiting for data.

    It stands still between `stop` and `start`. The first update of a start is not in it: that one compiles, looks for
    the fastest kernels and starts workers, and would be the figure of a short run.
    """

    def __init__(self, seconds: float = 0.0, samples: int = 0) -> None:
        self.seconds, self.samples = seconds, samples
        self.waiting = 0.0
        self.warm_up: float | None = None  # seconds of the first update, once it is done
        self._since: float | None = None

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self.lap()
        self._since = None

    def lap(self) -> float:
        """Bring `seconds` up to now and return it."""
        if self._since is not None:
            now = time.perf_counter()
            self.seconds += now - self._since
            self._since = now
        return self.seconds

    def trained(self, samples: int) -> None:
        """An update of so many samples is done."""
        if self.warm_up is not None:
            self.samples += samples
            return
        before = self.seconds
        self.warm_up = self.lap() - before
        self.seconds, self.waiting = before, 0.0

    def timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; the time until each is there is counted as waiting."""
        iterator = iter(batches)
        while True:
            before = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.waiting += time.perf_counter() - before
            yield batch
