"""The results of `accel-train bench`, as a dictionary for JSON."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from accelerate import Accelerator

from accel_train.bench.flops import peak_flops
from accel_train.bench.machine import machine
from accel_train.bench.statistics import ratio, spread
from accel_train.config.schema import Config
from accel_train.data.order.plan import Plan
from accel_train.launch.precision import precision


@dataclass(frozen=True)
class Trained:
    """What the trainer wrote into its metrics.jsonl, without the first updates."""

    images_per_second: float
    """Of all processes together; checkpoint stalls are counted as often as the recipe saves."""
    data_wait: float
    """Fraction of the time in which it waited for data."""
    stall: float
    """Fraction of the time in which a checkpoint delayed it."""
    host_peak_bytes: int
    device_peak_bytes: int | None


@dataclass(frozen=True)
class Round:
    """The measurements of one round. Rates are images a second, of all processes together."""

    limit: float
    input: float
    trainer: Trained
    pieces: dict[str, float]
    """Seconds of the "augmentation", "metrics" and "optimizer" of an update, each measured alone."""
    compiled_limit: float | None = None
    """None: not measured."""
    is_compiled: bool = False
    """Whether the trainer's model is."""

    def shares(self, batch_size: int) -> dict[str, float]:
        """Return the fractions (0 to 1) of the time of one update of the trainer."""
        update, optimizer = batch_size / self.trainer.images_per_second, self.pieces["optimizer"]
        limit = self.compiled_limit if self.is_compiled and self.compiled_limit else self.limit
        parts = {
            "forward and backward": (batch_size / limit - optimizer) / update,
            "optimizer": optimizer / update,
            "data wait": self.trainer.data_wait,
            "augmentation": self.pieces["augmentation"] / update,
            "metrics and guard": self.pieces["metrics"] / update,
            "checkpoint stall": self.trainer.stall,
        }
        parts = {name: min(1.0, max(0.0, part)) for name, part in parts.items()}
        return {**parts, "rest": max(0.0, 1 - sum(parts.values()))}


def figures_of(
    config: Config, accelerator: Accelerator, plan: Plan, rounds: list[Round], flops: int | None
) -> dict[str, Any]:
    """Return all results for JSON; of each rate the median, the quartiles and the single rounds.

    `flops`: operations of one forward and backward pass over one process's micro-batch; None if unknown. The ratios are
    those to the faster limit.
    """
    limits = {"limit": [each.limit for each in rounds]}
    compiled = [each.compiled_limit for each in rounds if each.compiled_limit is not None]
    if len(compiled) == len(rounds):
        limits["compiled limit"] = compiled
    faster = max(limits, key=lambda name: statistics.median(limits[name]))
    trainer = [each.trainer.images_per_second for each in rounds]
    alone = [each.input for each in rounds]
    shares = [each.shares(config.batch_size) for each in rounds]
    host = machine(accelerator.device)
    computed = precision(accelerator)
    per_image = None if flops is None else flops / plan.micro_batch
    done = None if per_image is None else per_image * statistics.median(trainer) / plan.processes
    peak = peak_flops(host["device"], computed)
    on_device = [each.trainer.device_peak_bytes for each in rounds]
    return {
        "recipe": config.recipe,
        "processes": plan.processes,
        "precision": computed,
        "batch_size": plan.batch_size,
        "accumulation": plan.accumulation,
        "micro_batch": plan.micro_batch,
        "division": plan.division,
        "rounds": len(rounds),
        "images_per_second": {
            **{name: asdict(spread(rates)) for name, rates in limits.items()},
            "input": asdict(spread(alone)),
            "trainer": asdict(spread(trainer)),
        },
        "faster_limit": faster,
        "ratios": {
            "trainer/limit": asdict(ratio(trainer, limits[faster])),
            "input/limit": asdict(ratio(alone, limits[faster])),
        },
        "update_seconds": asdict(spread([plan.batch_size / rate for rate in trainer])),
        "shares": {name: statistics.median(each[name] for each in shares) for name in shares[0]},
        "memory": {
            "host_peak_bytes": max(each.trainer.host_peak_bytes for each in rounds),
            "device_peak_bytes": None if None in on_device else max(peak for peak in on_device if peak is not None),
        },
        "flops": {
            "per_image": per_image,
            "per_second": done,
            "peak_per_second": peak,
            "share_of_peak": None if done is None or peak is None else done / peak,
        },
        "machine": host,
    }
