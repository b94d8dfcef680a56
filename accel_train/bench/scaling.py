"""How the speed grows with the number of processes: `accel-train scaling RUN…` compares finished runs.

All runs have the batch size of the recipe (strong scaling): they learn the same, and each process's share of a batch
shrinks as processes are added. benchmarks/scaling.py starts such runs itself, and others with a fixed batch for each
process (weak scaling).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_train.errors import UserError, counted
from accel_train.report.shared.plots import import_pyplot, save


@dataclass(frozen=True)
class Point:
    """The speed of one run. `speed_up` is relative to the run with the fewest processes.

    `efficiency`: the speed-up divided by that of linear growth.
    """

    processes: int
    images_per_second: float
    speed_up: float
    efficiency: float


def measure(runs: Sequence[Path]) -> list[Point]:
    """Read the speeds from the runs' result.json.

    Raises UserError if a run is not finished, or if two runs have the same number of processes.
    """
    speeds: dict[int, float] = {}
    for run in runs:
        try:
            result = json.loads((run / "result.json").read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{run} is not a finished run: {error}. Name folders with a result.json.") from None
        figures = result if isinstance(result, dict) else {}
        processes, speed = figures.get("world_size"), figures.get("images_per_second")
        if not isinstance(processes, int) or not isinstance(speed, int | float) or min(processes, speed) <= 0:
            raise UserError(
                f"{run / 'result.json'} lacks a positive world_size or images_per_second; leave this run out."
            )
        if processes in speeds:
            raise UserError(f"{run} is a second run of {processes} processes; name one run for each number.")
        speeds[processes] = speed
    if not speeds:
        raise UserError("No run was named; name the folders of finished runs: accel-train scaling RUN…")
    return speed_ups(speeds)


def speed_ups(speeds: Mapping[int, float]) -> list[Point]:
    """Return a Point for each entry of `speeds`: images/s of all processes together, by their number; not empty."""
    fewest = min(speeds)
    points = []
    for processes, speed in sorted(speeds.items()):
        speed_up = speed / speeds[fewest]
        points.append(Point(processes, speed, speed_up, speed_up * fewest / processes))
    return points


def plot(curves: Mapping[str, list[Point]], path: Path) -> None:
    """Draw the speed-up over the number of processes as an SVG file, with linear growth as a dashed line.

    `curves`: by name; the names are shown if there are several. All begin with the same number of processes. Raises
    UserError if matplotlib is not installed.
    """
    figure, axis = import_pyplot().subplots(figsize=(5, 3.75), layout="constrained")
    processes = sorted({point.processes for points in curves.values() for point in points})
    fewest = processes[0]
    axis.plot([0, processes[-1]], [0, processes[-1] / fewest], color="grey", linestyle="--", linewidth=1)
    for number, (name, points) in enumerate(curves.items()):
        line = [(point.processes, point.speed_up) for point in points]
        axis.plot(*zip(*line, strict=True), marker="o", label=name, color=f"C{number}")
        for point, place in zip(points, line, strict=True):
            text = f"{point.speed_up:.2f}x ({point.efficiency:.0%})"
            # The labels of the first curve are above its points, those of the others below theirs.
            shift = (-4, 8) if number == 0 else (4, -14)
            side = "right" if number == 0 else "left"
            axis.annotate(text, place, shift, textcoords="offset points", ha=side, color=f"C{number}", fontsize=8)
    axis.set(
        xlabel="processes", ylabel=f"speed-up over {counted(fewest, 'process')}", xticks=processes,
        xlim=(0, processes[-1] * 1.25), ylim=(0, None),
    )  # fmt: skip
    axis.set_title("speed-up (efficiency)", fontsize=10)
    if len(curves) > 1:
        axis.legend(loc="upper left")
    save(figure, path)
