"""The results of `accel-train bench`, as a dictionary for JSON and as tables."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator

from accel_train.bench.flops import peak_flops
from accel_train.bench.machine import machine
from accel_train.bench.statistics import Spread, ratio, spread
from accel_train.config.schema import Config
from accel_train.data.order.plan import Plan
from accel_train.errors import print_line
from accel_train.launch.precision import precision
from accel_train.records.table import print_table


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
            **{name: _plain(spread(rates)) for name, rates in limits.items()},
            "input": _plain(spread(alone)),
            "trainer": _plain(spread(trainer)),
        },
        "faster_limit": faster,
        "ratios": {
            "trainer/limit": _plain(ratio(trainer, limits[faster])),
            "input/limit": _plain(ratio(alone, limits[faster])),
        },
        "update_seconds": _plain(spread([plan.batch_size / rate for rate in trainer])),
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


def print_figures(figures: dict[str, Any]) -> None:
    """Print the tables. `figures`: from `figures_of`, with "synthetic", "updates" and "warm_up_updates" added."""
    rates, names = figures["images_per_second"], {"limit": "limit (bare loop)", "input": "input alone"}
    limit = rates[figures["faster_limit"]]["rounds"]
    rows = []
    for key, rate in rates.items():
        share = _plain(ratio(rate["rounds"], limit))
        form = "{:.1%}" if share["median"] < 10 else "{:,.0f}x"
        rows.append([names.get(key, key), *_cells(rate, "{:,.0f}"), *_cells(share, form)])
    print_line("")
    of_limit = "of the limit" if "compiled limit" not in rates else "of the faster limit"
    head = ["", "images/s", "quartiles", of_limit, "quartiles "]
    print_table(head, rows, numbers=head[1:])

    update = figures["update_seconds"]["median"]
    print_line("")
    rows = [[name, f"{share * update * 1e3:.3f}", f"{share:.1%}"] for name, share in figures["shares"].items()]
    print_table(["an update", "ms", "share"], [*rows, ["in all", f"{update * 1e3:.3f}", ""]], numbers=["ms", "share"])

    memory, flops, host = figures["memory"], figures["flops"], figures["machine"]
    processes = figures["processes"]
    print_line("")
    lines = {
        "device": f"{processes} process{'es' * (processes > 1)} on {host['device']}, {figures['precision']} "
        f"({host['processor']}, {host['cores']} cores, {host['threads']} threads a process)",
        "batch": figures["division"] + ", synthetic" * figures["synthetic"],
        "memory": f"at most {_bytes(memory['host_peak_bytes'])} of the host, {_bytes(memory['device_peak_bytes'])} "
        "of the device",
        "operations": f"{_giga(flops['per_second'])} a process, {_percent(flops['share_of_peak'])} of its device's "
        "peak",
        "measured": f"{figures['rounds']} rounds of {figures['updates']} updates, in turns; the first "
        f"{figures['warm_up_updates']} updates of each were left out as warm-up",
    }
    if host["computes_bf16"] and figures["precision"] == "fp32":
        lines["bf16"] = "the device has instructions for it: measure accelerate launch --mixed_precision bf16, too"
    for name, text in lines.items():
        print_line(f"{name:<12}{text}")


def _plain(measured: Spread) -> dict[str, Any]:
    return dataclasses.asdict(measured)


def _cells(measured: dict[str, Any], form: str) -> list[str]:
    low, high = form.format(measured["low"]), form.format(measured["high"])
    return [form.format(measured["median"]), f"{low} - {high}"]


def _bytes(number: int | None) -> str:
    return "n/a" if number is None else f"{number / 2**20:,.0f} MiB"


def _giga(number: float | None) -> str:
    return "n/a" if number is None else f"{number / 1e9:,.1f} GFLOP/s"


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.1%}"
