"""`accel-train bench`: how close the trainer comes to the limit of the device, and where the rest of the time goes.

Three things are measured in turns, so that a machine whose speed drifts is equally fast for each of them:

    limit    a bare loop of forward, backward and step on tensors that are already on the device
    input    only the input of the training: loaded, moved to the device, augmented, normalised
    trainer  train.train, as `accel-train train` runs it, with logging, metrics, guard and checkpoints

The first updates of each are left out: workers start, kernels are chosen, models are compiled. The trainer's speed is
the one that it writes into its own metrics.jsonl.

First comes `Workload`, which measures the loop, the input and single pieces of an update: its model, optimizer and
input are those of train.py; logging, checkpoints and signals around its loop are missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache
from torch import Tensor

from accel_train import models
from accel_train.config.schema import Config, Stop
from accel_train.data.order import NO_END
from accel_train.data.sources.load import Splits, splits_of
from accel_train.errors import LOGGER, writing
from accel_train.files import read_json_lines
from accel_train.launch.accelerator import precision
from accel_train.launch.agreement import broadcast_from_main
from accel_train.launch.environment import Launch
from accel_train.records.directory import environment
from accel_train.run.start import find_start
from accel_train.train import train
from accel_train.training_setup import connect, create_training_setup

KINDS = 4  # different micro-batches that the bare loop uses in turn
PIECE_SECONDS = 0.5  # a piece is repeated for about this time


class Workload:
    """The model and the input of a recipe on this process's device. All processes must make the same calls."""

    def __init__(self, config: Config, launch: Launch, splits: Splits) -> None:
        self.accelerator: Accelerator = connect(config, launch)
        config = find_start(config, self.accelerator).config
        self.setup = create_training_setup(config, launch, self.accelerator, splits, pretrained=False)
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
                with self.setup.step.around_backward():
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
                with self.setup.step.around_backward():
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


ROUND_SECONDS, FEWEST_UPDATES = 5.0, 20  # of one measurement of the bare loop, if --updates is not given
TEST_IMAGES = 256  # of the evaluations at the ends of the trainer's epochs, which its speed does not include


@dataclass(frozen=True)
class Round:
    """The measurements of one round. Rates are images a second, of all processes together."""

    limit: float
    input: float
    trainer: float
    """What the trainer wrote into its metrics.jsonl, as the next two."""
    data_wait: float
    """Fraction of the trainer's time in which it waited for data."""
    save_seconds: float
    """For which a checkpoint stops the training; not part of the trainer's rate."""
    pieces: dict[str, float]
    """Seconds of the "augmentation" and the "optimizer" of an update, each measured alone."""

    def shares(self, batch_size: int) -> dict[str, float]:
        """Return the fractions (0 to 1) of the time of one update of the trainer."""
        update, optimizer = batch_size / self.trainer, self.pieces["optimizer"]
        parts = {
            "forward and backward": (batch_size / self.limit - optimizer) / update,
            "optimizer": optimizer / update,
            "data wait": self.data_wait,
            "augmentation": self.pieces["augmentation"] / update,
        }
        parts = {name: min(1.0, max(0.0, part)) for name, part in parts.items()}
        return {**parts, "rest": max(0.0, 1 - sum(parts.values()))}


def bench(
    launch: Launch, config: Config, place: Path, *, rounds: int = 5, updates: int | None = None
) -> dict[str, Any]:
    """Measure the training of the recipe `config`; return what `accel-train bench` writes. Collective.

    `place`: the folder in which the runs are kept while they are needed. `updates`: of each measurement; None: as many
    as the bare loop does in 5 seconds. Raises UserError if the data is missing, nothing can be written in `place`, or
    the trainer fails.
    """
    config = dataclasses.replace(config, resume="auto", output_dir=None, trackers=())
    workload = Workload(config, launch, splits_of(config))
    accelerator, plan = workload.accelerator, workload.plan
    runs = broadcast_from_main(accelerator, lambda: temporary_folder(place))
    try:
        if updates is None:
            seconds = workload.bare_seconds(5, warm_up=3) / 5
            updates = broadcast_from_main(accelerator, lambda: max(FEWEST_UPDATES, math.ceil(ROUND_SECONDS / seconds)))
        warm_up = max(1, min(config.log_every_updates, updates // 4))
        del workload
        _clear(accelerator)
        measured = []
        for number in range(1, rounds + 1):
            measured.append(_round(config, launch, runs / f"round-{number}", updates, warm_up))
            if accelerator.is_main_process:
                last = measured[-1]
                LOGGER.info(f"round {number} of {rounds}: trainer {last.trainer / last.limit:.1%} of the limit")
    finally:
        if launch.rank == 0:
            shutil.rmtree(runs, ignore_errors=True)
    results = {
        "recipe": config.recipe,
        "processes": plan.processes,
        "device": device_name(accelerator.device),
        "precision": precision(accelerator),
        "batch_size": plan.batch_size,
        "accumulation": plan.accumulation,
        "micro_batch": plan.micro_batch,
        "division": plan.division,
        "rounds": rounds,
        "updates": updates,
        "warm_up_updates": warm_up,
        **summary(measured, plan.batch_size),
        "environment": environment(launch.world_size, [str(accelerator.device)]),
    }
    return broadcast_from_main(accelerator, lambda: results)


def summary(rounds: list[Round], batch_size: int) -> dict[str, Any]:
    """Return what was measured, for JSON; of each rate the median, the quartiles and the single rounds."""
    rates = {name: [getattr(each, name) for each in rounds] for name in ("limit", "input", "trainer")}
    shares = [each.shares(batch_size) for each in rounds]
    return {
        "images_per_second": {name: asdict(spread(measured)) for name, measured in rates.items()},
        "ratios": {f"{name}/limit": asdict(ratio(rates[name], rates["limit"])) for name in ("trainer", "input")},
        "update_seconds": asdict(spread([batch_size / rate for rate in rates["trainer"]])),
        "shares": {name: statistics.median(each[name] for each in shares) for name in shares[0]},
        "save_seconds": statistics.median(each.save_seconds for each in rounds),
    }


def _round(config: Config, launch: Launch, run: Path, updates: int, warm_up: int) -> Round:
    """Measure limit, input and trainer once, each with its own model and data, so that nothing else is in memory."""
    workload = Workload(config, launch, splits_of(config))
    accelerator, images = workload.accelerator, config.batch_size * updates
    alone = images / workload.input_seconds(updates, warm_up)
    pieces = workload.piece_seconds()
    limit = images / workload.bare_seconds(updates, warm_up)
    del workload
    _clear(accelerator)

    short = shortened(config, run, updates, warm_up)
    with contextlib.redirect_stdout(io.StringIO()):
        result = train(short, launch)
    if not result.finished:  # a signal has stopped the run
        raise KeyboardInterrupt
    trained = broadcast_from_main(accelerator, lambda: read_run(run, warm_up))
    _clear(accelerator)
    return Round(limit, alone, *trained, pieces)


def shortened(config: Config, run: Path, updates: int, warm_up: int) -> Config:
    """Return the recipe with so many updates after its warm-up. It evaluates few images, and saves only where no speed
    is measured: at the ends of epochs."""
    return dataclasses.replace(
        config,
        output_dir=run,
        epochs=max(config.epochs, warm_up + updates),  # an epoch may have one update only
        stop=Stop(updates=warm_up + updates),
        eval_every_updates=None,
        log_every_updates=warm_up,
        data=dataclasses.replace(config.data, test_limit=min(TEST_IMAGES, config.data.test_limit or TEST_IMAGES)),
        checkpoint=dataclasses.replace(config.checkpoint, every_updates=None, every_seconds=0.0),
    )


def read_run(run: Path, warm_up: int) -> tuple[float, float, float]:
    """Return images/s, the fraction of data wait and the seconds for which a save stopped a `shortened` run."""
    lines = [*read_json_lines(run / "metrics.jsonl")]
    trained = [line for line in lines if line["kind"] == "train" and line["update"] > warm_up]
    seconds = sum(line["seconds"] for line in trained)
    images = sum(line["images_per_second"] * line["seconds"] for line in trained)
    waiting = sum(line["data_wait_fraction"] * line["seconds"] for line in trained)
    stalled = statistics.median(line["stalled_seconds"] for line in lines if line["kind"] == "checkpoint")
    return images / seconds, waiting / seconds, stalled


def _clear(accelerator: Accelerator) -> None:
    accelerator.free_memory()
    gc.collect()
    torch.compiler.reset()  # torch stops compiling the same code after a few models


def temporary_folder(parent: Path) -> Path:
    """Create a temporary folder in `parent`, which is on the disk that the user chose and all nodes share."""
    with writing("--output", parent):
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".bench-", dir=parent))
