"""How the speed grows with the number of processes: `accel-train scaling RUN…` compares finished runs.

Prints a table and writes it, with a plot, as scaling.csv and scaling.svg beside the runs. The batch size is that of
the recipe in all of them (strong scaling): what is learned is the same, and the share of a process gets smaller.
benchmarks/scaling.py starts such runs itself, and others with a fixed batch a process (weak scaling).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_train.errors import UserError

WIDTH, HEIGHT, MARGIN = 480, 360, 50  # of the plot, in pixels
COLOURS = ("#1668b0", "#c05621", "#2f7d3b", "#6b4ea0")  # of its curves, in turns


@dataclass(frozen=True)
class Point:
    """One run. `speed_up` is relative to the run with the fewest processes, `efficiency` of 1 is linear growth."""

    processes: int
    images_per_second: float
    speed_up: float
    efficiency: float


def measure(runs: Sequence[Path]) -> list[Point]:
    """Read the runs' result.json. Raises UserError if a run is not finished or two have the same processes."""
    speeds: dict[int, float] = {}
    for run in runs:
        try:
            result = json.loads((run / "result.json").read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{run} is not a finished run: {error}.") from None
        figures = result if isinstance(result, dict) else {}
        processes, speed = figures.get("world_size"), figures.get("images_per_second")
        if not isinstance(processes, int) or not isinstance(speed, int | float) or min(processes, speed) <= 0:
            raise UserError(f"{run / 'result.json'} has no number of processes and images a second to compare.")
        if processes in speeds:
            raise UserError(f"{run} is a second run of {processes} processes; give one of each.")
        speeds[processes] = speed
    if not speeds:
        raise UserError("Name the directories of finished runs: accel-train scaling RUN…")
    return speed_ups(speeds)


def speed_ups(speeds: Mapping[int, float]) -> list[Point]:
    """`speeds`: images a second of all processes together, by their number; at least one."""
    fewest = min(speeds)
    points = []
    for processes, speed in sorted(speeds.items()):
        speed_up = speed / speeds[fewest]
        points.append(Point(processes, speed, speed_up, speed_up * fewest / processes))
    return points


def plot(curves: Mapping[str, list[Point]]) -> str:
    """An SVG picture of the speed-up over the number of processes, with the line of linear growth.

    `curves`: by their names, which are shown if there are several; all begin with the same number of processes.
    """
    everything = [point for points in curves.values() for point in points]
    fewest, most = min(point.processes for point in everything), max(point.processes for point in everything)
    top = max(most / fewest, *(point.speed_up for point in everything))

    def place(processes: float, speed_up: float) -> tuple[float, float]:
        x = MARGIN + (WIDTH - 2 * MARGIN) * processes / most
        return x, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * speed_up / top

    def line(pairs: list[tuple[float, float]], style: str) -> str:
        return f'<polyline fill="none" {style} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)}"/>'

    ranked = sorted(everything, key=lambda point: -point.speed_up)
    left, bottom = place(0, 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="12" text-anchor="middle">',
        '<rect width="100%" height="100%" fill="white"/>',
        line([(left, MARGIN), (left, bottom), (WIDTH - MARGIN, bottom)], 'stroke="black"'),
        line([place(0, 0), place(most, most / fewest)], 'stroke="grey" stroke-dasharray="4"'),
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}">processes</text>',
        f'<text x="{WIDTH / 2}" y="20">speed-up over {fewest} process{"es" * (fewest > 1)} (efficiency)</text>',
    ]
    for number, (name, points) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(
            line([place(point.processes, point.speed_up) for point in points], f'stroke="{colour}" stroke-width="2"')
        )
        for point in points:
            x, y = place(point.processes, point.speed_up)
            highest = next(other for other in ranked if other.processes == point.processes)
            label = y - 9 if point is highest else y + 18  # two curves' figures are not to lie on each other
            figures = f"{point.speed_up:.2f}x ({point.efficiency:.0%})"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
            parts.append(f'<text x="{x:.1f}" y="{label:.1f}" fill="{colour}">{figures}</text>')
        if len(curves) > 1:
            parts.append(
                f'<text x="{left + 10}" y="{50 + 16 * number}" text-anchor="start" fill="{colour}">{name}</text>'
            )
    for processes in sorted({point.processes for point in everything}):
        parts.append(f'<text x="{place(processes, 0)[0]:.1f}" y="{HEIGHT - MARGIN + 18}">{processes}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def compare(runs: Sequence[Path]) -> int:
    """Compare the finished runs in the folders `runs`; returns the exit code. Raises UserError."""
    points = measure(runs)
    folder = runs[0].resolve().parent
    print("processes   images/s   speed-up   efficiency")
    for point in points:
        print(f"{point.processes:9d} {point.images_per_second:10,.0f} {point.speed_up:10.2f} {point.efficiency:11.0%}")
    with (folder / "scaling.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["processes", "images_per_second", "speed_up", "efficiency"])
        writer.writerows([p.processes, p.images_per_second, p.speed_up, p.efficiency] for p in points)
    (folder / "scaling.svg").write_text(plot({"": points}))
    print(f"written: {folder / 'scaling.csv'}, {folder / 'scaling.svg'}")
    return 0
