"""The parts of a training for `accel-train bench`: the bare loop, the input, and single pieces of an update.

Model, optimizer and input are those of train.py; logging, checkpoints and signals around its loop are missing. At the
end of the file is what measures: a clock, and the median and quartiles of several rounds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache
from torch import Tensor

from accel_train import models
from accel_train.config.schema import Config
from accel_train.data.order.plan import NO_END
from accel_train.data.sources.load import Splits
from accel_train.launch.agreement import broadcast_from_main
from accel_train.launch.environment import Launch
from accel_train.run.start import find_start
from accel_train.training_setup import connect, create_training_setup

KINDS = 4  # different micro-batches that the bare loop uses in turn
PIECE_SECONDS = 0.5  # a piece is repeated for about this time


class Workload:
    """The model and the input of a recipe on this process's device. All processes must make the same calls."""

    def __init__(self, config: Config, launch: Launch, splits: Splits) -> None:
        self.accelerator: Accelerator = connect(config, launch)
        config = find_start(config, self.accelerator).config
        self.setup = create_training_setup(config, launch, self.accelerator, splits, published=False)
        for group in self.setup.optimizer.param_groups:
            group["lr"] = 0.0  # a step takes the same time, and the weights stay the same: nothing can diverge
        self.plan, self.accumulation = self.setup.plan, self.setup.plan.accumulation
        # What is measured may be longer than the recipe's run.
        self.setup.sampler.plan = dataclasses.replace(self.plan, updates=NO_END)
        models.set_train_mode(self.setup.model, config.model)
        # Tensors on the device. This pass also warms the input up.
        self.batches = list(self._raw(-(-KINDS // self.accumulation)))[:KINDS]
        self.examples = [self.setup.training.transform(batch) for batch in self.batches]

    def _clock(self) -> Clock:
        """Return a clock that starts when the last process begins and stops when the last device has finished."""
        return Clock(self.setup.device, self.accelerator.wait_for_everyone)

    def _raw(self, updates: int) -> Iterator[dict[str, Tensor]]:
        """Yield the micro-batches of `updates` updates. Each pass reaches the end of its epoch."""
        epoch = 0
        while updates > 0:
            some = min(updates, self.plan.updates_per_epoch)
            self.setup.sampler.seek(epoch, (self.plan.updates_per_epoch - some) * self.plan.batch_size)
            yield from self.setup.training.batches
            epoch, updates = epoch + 1, updates - some

    def input_seconds(self, updates: int, warm_up: int) -> float:
        """Measure the input of `updates` updates alone: loading, the move to the device and the transform."""
        clock = self._clock()
        for number, batch in enumerate(self._raw(warm_up + updates)):
            if number == warm_up * self.accumulation:
                clock.start()
            self.setup.training.transform(batch)
        return clock.stop()

    def backward_alone(self) -> None:
        """Forward and backward of one micro-batch, with the memory of an update but without a sum over the processes.

        Raises the device's error if it has too little memory.
        """
        inputs, targets = self.examples[0]
        try:
            for _ in range(2):  # the second time beside gradients and the optimizer's state
                losses: Tensor = self.setup.criterion(self.setup.bare_model(inputs), targets)
                with models.preserve_buffers(self.setup.step.recomputed_buffers):
                    self.accelerator.backward(losses.mean())
                self.setup.optimizer.step()
        finally:
            self.setup.optimizer.zero_grad()
            clear_device_cache(garbage_collection=True)

    def bare_seconds(self, updates: int, warm_up: int) -> float:
        """Measure `updates` updates of the bare loop: forward, backward and step on tensors on the device."""
        clock = self._clock()
        examples = cycle(self.examples)
        for number in range(warm_up + updates):
            if number == warm_up:
                clock.start()
            self._backward(examples)
            self.setup.optimizer.step()
            self.setup.optimizer.zero_grad()
        return clock.stop()

    def _backward(self, examples: Iterator[tuple[Tensor, Tensor]]) -> None:
        """Run forward and backward of an update."""
        model, scaler = self.setup.model, self.accelerator.scaler
        for micro_batch in range(self.accumulation):
            is_last = micro_batch + 1 == self.accumulation
            with contextlib.nullcontext() if is_last else self.accelerator.no_sync(model):
                inputs, targets = next(examples)
                losses: Tensor = self.setup.criterion(model(inputs), targets)
                loss = losses.mean() / self.accumulation
                with models.preserve_buffers(self.setup.step.recomputed_buffers):
                    (loss if scaler is None else scaler.scale(loss)).backward()

    def piece_seconds(self) -> dict[str, float]:
        """Measure each piece of one update alone: the augmentation and the optimizer's step."""
        self._backward(cycle(self.examples))

        def augment() -> None:
            for _ in range(self.accumulation):
                self.setup.training.transform(self.batches[-1])

        return {
            "augmentation": self._mean_seconds(augment),
            "optimizer": self._mean_seconds(self.setup.optimizer.step),
        }

    def _mean_seconds(self, piece: Callable[[], Any]) -> float:
        def mean(times: int) -> float:
            clock = self._clock()
            clock.start()
            for _ in range(times):
                piece()
            return clock.stop() / times

        mean(2)  # a warm-up
        wanted = min(1000, max(5, round(PIECE_SECONDS / max(mean(5), 1e-9))))
        return mean(broadcast_from_main(self.accelerator, lambda: wanted))


class Clock:
    """Measures seconds between `start` and `stop`; at both it waits until the device has finished its work."""

    def __init__(self, device: torch.device, meet: Callable[[], object] = lambda: None) -> None:
        """`meet`: waits for all processes whose work is measured, so that the slowest one counts."""
        self.device, self.meet = device, meet
        self._since = 0.0

    def start(self) -> None:
        self._wait()
        self._since = time.perf_counter()

    def stop(self) -> float:
        """Seconds since `start`."""
        self._wait()
        return time.perf_counter() - self._since

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.meet()


def device_name(device: torch.device) -> str:
    """Return the name of the device ("NVIDIA A100-SXM4-80GB"), or its type ("cpu") if torch knows no name."""
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


@dataclass(frozen=True)
class Spread:
    """The median of the rounds and the two quartiles: half of the rounds are between `low` and `high`."""

    median: float
    low: float
    high: float
    rounds: tuple[float, ...] = ()


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of `values`: at least one, in the order of the rounds."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], (values[0],))
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, tuple(values))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Return the spread of the ratios within each round, which do not change when the machine's speed drifts."""
    return spread([above / below for above, below in zip(numerators, denominators, strict=True)])
