"""What a run cost, from its starts: for result.json, the last screen and the report."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from accel_train.records.cost.ledger import Start

PHASES = {
    "training": "training",
    "evaluating": "evaluation",
    "saving": "waiting for saves",
    "starting": "starting, until the first update is done",
    "repeated": "done twice after interruptions",
}


def cost_of(starts: Sequence[Start]) -> dict[str, Any]:
    """What the run cost, as result.json has it: seconds, and None for what nobody has measured; {} without a start.

    The effective training time ratio (ETTR, arXiv 2410.21680) is the part of the wall time in which the run made
    progress that it kept: training and evaluation. The wall time is that of all starts and of the time between them,
    in which the job was waiting to go on; not the time between a finished run and its continuation.
    """
    if not starts:
        return {}
    between = sum(max(0.0, later.began - each.ended) for each, later in pairwise(starts) if not each.finished)
    seconds = {phase: sum(getattr(start, phase) for start in starts) for phase in PHASES}
    spans = [max(0.0, start.ended - start.began) for start in starts]
    wall = sum(spans) + between
    accelerators = sum(start.accelerators * span for start, span in zip(starts, spans, strict=True))
    joules = _all("device_joules", starts)
    busy = _all("device_utilisation", starts)
    return {
        "starts": len(starts),
        "complete": starts[0].first_update == 0,  # otherwise another run began it
        "wall_seconds": wall,
        **{f"{phase}_seconds": value for phase, value in seconds.items()},
        "between_seconds": between,
        "waiting_for_data_seconds": sum(start.waiting for start in starts),
        "ettr": (seconds["training"] + seconds["evaluating"]) / wall if wall else None,
        "accelerator_hours": accelerators / 3600 if accelerators else None,
        "process_peak_bytes": _largest("process_peak_bytes", starts),
        "device_peak_bytes": _largest("device_peak_bytes", starts),
        "device_utilisation": None
        if busy is None
        else sum(b * span for b, span in zip(busy, spans, strict=True)) / (sum(spans) or 1.0),
        "device_kwh": None if joules is None else sum(joules) / 3.6e6,
    }


def _all(name: str, starts: Sequence[Start]) -> list[float] | None:
    """A figure of each start; None if one lacks it."""
    values = [start.usage.get(name) for start in starts]
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None


def _largest(name: str, starts: Sequence[Start]) -> float | None:
    return max((value for start in starts if (value := start.usage.get(name)) is not None), default=None)


def cost_text(cost: dict[str, Any]) -> str:
    """One line for the last screen: the wall time, its parts of one percent and more, and the ETTR."""
    wall = cost["wall_seconds"]
    names = {"training": "training", "evaluating": "evaluating", "saving": "saving", "starting": "starting",
             "repeated": "done twice", "between": "between starts"}  # fmt: skip
    parts = [f"{share:.0%} {name}" for key, name in names.items() if (share := cost[f"{key}_seconds"] / wall) >= 0.005]
    starts = f" in {cost['starts']} starts" if cost["starts"] > 1 else ""
    return f"{duration(wall)}{starts}: {', '.join(parts)}"


def cost_rows(cost: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows of the report: what, and how much."""
    wall = cost["wall_seconds"]
    rows = [("starts", str(cost["starts"])), ("wall time", duration(wall))]
    if not cost["complete"]:
        rows.append(("not counted", "what came before the checkpoint with which this record begins"))
    for phase, title in {**PHASES, "between": "between two starts"}.items():
        seconds = cost[f"{phase}_seconds"]
        if seconds:
            rows.append((title, f"{duration(seconds)} ({seconds / wall:.1%})"))
    rows.append(("of the training: waiting for data", duration(cost["waiting_for_data_seconds"])))
    if cost["ettr"] is not None:
        rows.append(("effective training time ratio", f"{cost['ettr']:.1%}"))
    units = {
        "accelerator_hours": ("accelerator-hours", "{:.3g}", 1),
        "device_utilisation": ("mean utilisation of the accelerators", "{:.0%}", 1),
        "device_kwh": ("energy of the accelerators", "{:.3g} kWh", 1),
        "device_peak_bytes": ("largest memory on an accelerator", "{:.2f} GiB", 2**30),
        "process_peak_bytes": ("largest memory of a process", "{:.2f} GiB", 2**30),
    }
    known = {key: cost[key] for key in units if cost[key] is not None}
    return rows + [(units[key][0], units[key][1].format(value / units[key][2])) for key, value in known.items()]


def duration(seconds: float) -> str:
    """A time in words: "2 h 05 min", "3 min 10 s" or "4.2 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
