"""`accel-train bench`: how close the trainer comes to the limit of the device, and where the rest of the time goes.

Three things are measured in turns, so that a machine whose speed drifts is equally fast for each of them:

    limit    a bare loop of forward, backward and step on tensors that are already on the device
    input    only the input of the training: loaded, moved to the device, augmented, normalised
    trainer  train.train, as `accel-train train` runs it, with logging, metrics, guard and checkpoints

The first updates of each are left out: workers start, kernels are chosen, models are compiled. The trainer's speed is
the one that it writes into its own metrics.jsonl.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from accel_train.config.schema import Config, Stop
from accel_train.data.sources.load import splits_of
from accel_train.errors import LOGGER, writing
from accel_train.launch.accelerator import precision
from accel_train.launch.agreement import broadcast_from_main
from accel_train.launch.environment import Launch
from accel_train.records.provenance import environment
from accel_train.tools.workload import Workload, device_name, ratio, spread
from accel_train.train import train
from accel_train.untrusted import read_json_lines

ROUND_SECONDS, FEWEST_UPDATES = 5.0, 20  # of one measurement of the bare loop, if --updates is not given
TEST_IMAGES = 256  # of the evaluations at the ends of the trainer's epochs, which its speed does not include


@dataclass(frozen=True)
class BenchResult:
    """What was measured, the same on all processes."""

    figures: dict[str, Any]
    """As `accel-train bench` writes them to a file."""


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


def bench(launch: Launch, config: Config, place: Path, *, rounds: int = 5, updates: int | None = None) -> BenchResult:
    """Measure the training of the recipe `config`. Collective.

    `place`: the folder in which the runs are kept while they are needed. `updates`: of each measurement; None: as many
    as the bare loop does in 5 seconds. Raises UserError if the data is missing, nothing can be written in `place`, or
    the trainer fails.
    """
    config = dataclasses.replace(config, resume="auto", trackers=())
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
    figures = {
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
    return BenchResult(broadcast_from_main(accelerator, lambda: figures))


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
