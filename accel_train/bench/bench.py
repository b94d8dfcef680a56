"""`accel-train bench`: how close the trainer comes to the limit of the device, and where the rest of the time goes.

Three things are measured in turns, so that a machine whose speed drifts is equally fast for each of them:

    limit    a bare loop of forward, backward and step on tensors that are already on the device
    input    only the input of the training: loaded, moved to the device, augmented, normalised
    trainer  train.train, as `accel-train train` runs it, with logging, metrics, guard and checkpoints

The first updates of each are left out: workers start, kernels are chosen, models are compiled. The trainer's speed is
the one that it writes into its own metrics.jsonl. A short run saves more often than a real one. So the time for which
one save delays the training is measured, and counted as often as the recipe saves.
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

from accel_train import models
from accel_train.bench import OR_SYNTHETIC
from accel_train.bench.statistics import ratio, spread
from accel_train.bench.workload import Workload, device_name
from accel_train.config.schema import Config, Stop
from accel_train.data.order.plan import Plan
from accel_train.data.sources.arrays import PUBLISHED, TRAIN_IMAGES
from accel_train.data.sources.load import Splits, splits_of
from accel_train.errors import LOGGER, UnsavedError, UserError, writing
from accel_train.launch.agreement import broadcast_from_main
from accel_train.launch.environment import Launch
from accel_train.launch.precision import precision
from accel_train.records.provenance import environment
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
    """What the trainer wrote into its metrics.jsonl; checkpoint stalls are counted as often as the recipe saves."""
    data_wait: float
    """Fraction of the trainer's time in which it waited for data."""
    stall: float
    """Fraction of the trainer's time in which a checkpoint delayed it."""
    pieces: dict[str, float]
    """Seconds of the "augmentation", "metrics" and "optimizer" of an update, each measured alone."""

    def shares(self, batch_size: int) -> dict[str, float]:
        """Return the fractions (0 to 1) of the time of one update of the trainer."""
        update, optimizer = batch_size / self.trainer, self.pieces["optimizer"]
        parts = {
            "forward and backward": (batch_size / self.limit - optimizer) / update,
            "optimizer": optimizer / update,
            "data wait": self.data_wait,
            "augmentation": self.pieces["augmentation"] / update,
            "metrics and guard": self.pieces["metrics"] / update,
            "checkpoint stall": self.stall,
        }
        parts = {name: min(1.0, max(0.0, part)) for name, part in parts.items()}
        return {**parts, "rest": max(0.0, 1 - sum(parts.values()))}


def bench(
    launch: Launch, config: Config, place: Path, *, synthetic: bool = False, rounds: int = 5, updates: int | None = None
) -> BenchResult:
    """Measure the training of the recipe `config`. Collective.

    `place`: the folder in which the runs are kept while they are needed. `synthetic`: use synthetic images. `updates`:
    of each measurement; None: as many as the bare loop does in 5 seconds. Raises UserError if the data is missing,
    nothing can be written in `place`, or the trainer fails.
    """
    config = dataclasses.replace(config, resume="auto", trackers=())
    if synthetic:
        config = with_synthetic_data(config)
    splits = _load(config, synthetic)
    workload = Workload(config, launch, splits)
    accelerator, plan = workload.accelerator, workload.plan
    runs = broadcast_from_main(accelerator, lambda: temporary_folder(place))
    try:
        if updates is None:
            seconds = workload.bare_seconds(5, warm_up=3) / 5
            updates = broadcast_from_main(accelerator, lambda: max(FEWEST_UPDATES, math.ceil(ROUND_SECONDS / seconds)))
        warm_up = max(1, min(config.log_every_updates, updates // 4))
        del workload, splits
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
        **figures_of(config, accelerator, plan, measured),
        "synthetic": synthetic,
        "updates": updates,
        "warm_up_updates": warm_up,
        "environment": environment(launch.world_size, [str(accelerator.device)]),
    }
    return BenchResult(broadcast_from_main(accelerator, lambda: figures))


def figures_of(config: Config, accelerator: Accelerator, plan: Plan, rounds: list[Round]) -> dict[str, Any]:
    """Return all results for JSON; of each rate the median, the quartiles and the single rounds."""
    rates = {name: [getattr(each, name) for each in rounds] for name in ("limit", "input", "trainer")}
    shares = [each.shares(config.batch_size) for each in rounds]
    return {
        "recipe": config.recipe,
        "processes": plan.processes,
        "device": device_name(accelerator.device),
        "precision": precision(accelerator),
        "batch_size": plan.batch_size,
        "accumulation": plan.accumulation,
        "micro_batch": plan.micro_batch,
        "division": plan.division,
        "rounds": len(rounds),
        "images_per_second": {name: asdict(spread(measured)) for name, measured in rates.items()},
        "ratios": {f"{name}/limit": asdict(ratio(rates[name], rates["limit"])) for name in ("trainer", "input")},
        "update_seconds": asdict(spread([plan.batch_size / rate for rate in rates["trainer"]])),
        "shares": {name: statistics.median(each[name] for each in shares) for name in shares[0]},
    }


def with_synthetic_data(config: Config) -> Config:
    """Return the same recipe on as many synthetic images, with as many channels, of the size of the model's input.

    Nothing is known about folders and hub datasets that are missing.
    """
    data = config.data
    if data.name in PUBLISHED:
        published = PUBLISHED[data.name]
        channels, size, images = len(published.mean), published.size, published.train_images
    elif data.name in ("digits", "synthetic"):
        return config  # needs no download
    else:
        channels, size, images = data.channels, 224, max(TRAIN_IMAGES, 2 * config.batch_size)
    synthetic = dataclasses.replace(
        data,
        name="synthetic",
        channels=channels,
        train_limit=data.train_limit or images,
        val_fraction=0.0,
        test_fraction=0.0,
        sampler="balanced" if data.sampler == "weights" else data.sampler,  # drawn in the same time
    )
    model = dataclasses.replace(config.model, image_size=models.input_size(config.model, size, config.origin))
    return dataclasses.replace(config, data=synthetic, model=model)


def shortened(config: Config, plan: Plan, updates: int, log_every: int) -> Config:
    """Return the recipe with about `updates` updates: part of an epoch, or several epochs of a small dataset.

    `plan`: of the whole recipe. The short recipe saves only at the ends of epochs, where no speed is measured, and it
    evaluates few images.
    """
    fits = updates * config.batch_size <= plan.samples
    limit = updates * config.batch_size if fits else config.data.train_limit
    in_an_epoch = updates if fits else plan.updates_per_epoch
    warmup = config.schedule.warmup_epochs * plan.updates_per_epoch / in_an_epoch  # as many updates
    return dataclasses.replace(
        config,
        epochs=1 if fits else math.ceil(updates / plan.updates_per_epoch),
        eval_every_updates=None,
        log_every_updates=log_every,
        data=dataclasses.replace(
            config.data, train_limit=limit, test_limit=min(TEST_IMAGES, config.data.test_limit or TEST_IMAGES)
        ),
        schedule=dataclasses.replace(config.schedule, warmup_epochs=warmup),
        stop=Stop(),
        checkpoint=dataclasses.replace(config.checkpoint, every_updates=None, every_seconds=0.0),
    )


def read_run(run: Path, config: Config, plan: Plan, warm_up: int) -> tuple[float, float, float]:
    """Return images/s, the fraction of data wait and the fraction of checkpoint stalls of a `shortened` run.

    `config` and `plan`: of the whole recipe, which say how often it saves.
    """
    lines = [*read_json_lines(run / "metrics.jsonl")]
    trained = [line for line in lines if line["kind"] == "train" and line["update"] > warm_up]
    seconds = sum(line["seconds"] for line in trained)
    images = sum(line["images_per_second"] * line["seconds"] for line in trained)
    waiting = sum(line["data_wait_fraction"] * line["seconds"] for line in trained)
    stalled = statistics.median(line["stalled_seconds"] for line in lines if line["kind"] == "checkpoint")

    update = seconds / (trained[-1]["update"] - warm_up)
    saves = config.checkpoint
    between = saves.every_epochs * plan.updates_per_epoch
    if saves.every_updates is not None:
        between = min(between, saves.every_updates)
    if saves.every_seconds:
        between = min(between, math.ceil(saves.every_seconds / update))
    stall = stalled / between
    share = update / (update + stall)  # of the time in which no checkpoint delays it
    return images / seconds * share, waiting / seconds * share, 1 - share


def _load(config: Config, synthetic: bool) -> Splits:
    try:
        return splits_of(config)
    except UserError as error:
        if synthetic:
            raise
        raise UserError(f"{error} {OR_SYNTHETIC}") from error


def _round(config: Config, launch: Launch, run: Path, updates: int, warm_up: int) -> Round:
    """Measure limit, input and trainer once, each with its own model and data, so that nothing else is in memory.

    One half of the limit is measured before the trainer and one after it. Otherwise a machine that is fast only for
    some seconds, or that others begin to use, would favour one of the two.
    """
    workload = Workload(config, launch, splits_of(config))
    accelerator, plan, images = workload.accelerator, workload.plan, config.batch_size * updates
    half = -(-updates // 2)
    bare_seconds = workload.bare_seconds(half, warm_up)
    alone = images / workload.input_seconds(updates, warm_up)
    pieces = workload.piece_seconds()
    del workload
    _clear(accelerator)

    short = dataclasses.replace(shortened(config, plan, warm_up + updates, warm_up), output_dir=run)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            result = train(short, launch)
        except UnsavedError:
            result = None
    if result is None or result.failed_writes:
        raise UserError(
            "The trainer could not save its checkpoints (see above); free disk space or name another --output."
        )
    if not result.finished:  # a signal has stopped the run
        raise KeyboardInterrupt
    trained = broadcast_from_main(accelerator, lambda: read_run(run, config, plan, warm_up))
    _clear(accelerator)

    workload = Workload(config, launch, splits_of(config))
    bare_seconds += workload.bare_seconds(half, warm_up)
    del workload
    _clear(accelerator)
    return Round(config.batch_size * 2 * half / bare_seconds, alone, *trained, pieces)


def _clear(accelerator: Accelerator) -> None:
    accelerator.free_memory()
    gc.collect()
    torch.compiler.reset()  # torch stops compiling the same code after a few models


def temporary_folder(parent: Path) -> Path:
    """Create a temporary folder in `parent`, which is on the disk that the user chose and all nodes share."""
    with writing("--output", parent):
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".bench-", dir=parent))
