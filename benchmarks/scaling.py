"""Measure how the images per second grow with the number of processes. Strong scaling: all processes share the
recipe's batch. Weak scaling: each process has a batch of the same size.

    python benchmarks/scaling.py            # mnist_cnn on 1 and 2 processes of this machine's CPU
    python benchmarks/scaling.py cifar10_resnet18_sota --processes 1 2 4 8 --batch-size 1024 \\
        --config-file accelerate_configs/multi_gpu.yaml

Each point is `accel-train train` under accelerate's launcher. They take turns: the processes of one point run for
about a second while those of all others are stopped (turns.py). The table is written to docs/benchmarks.md, the figures
to docs/benchmarks.json, the plot to the same folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import document
import turns
from trainer import trainer

from accel_train.cli.common import print_table
from accel_train.errors import counted
from accel_train.tools.bench import spread
from accel_train.tools.report.curves import import_pyplot

WARM_UP = 3  # rounds
STRONG, WEAK = "fixed global batch", "fixed batch per process"
CPU = document.ROOT / "accelerate_configs" / "multi_cpu.yaml"


@dataclass(frozen=True)
class Point:
    """The speed of one run. `speed_up` is relative to the run with the fewest processes.

    `efficiency`: the speed-up divided by that of linear growth.
    """

    processes: int
    images_per_second: float
    speed_up: float
    efficiency: float


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
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="mnist_cnn")
    parser.add_argument("--batch-size", type=int, default=256, help="global batch of the smallest number of processes")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--config-file", type=Path, default=CPU, help="accelerate's config file")
    parser.add_argument("--data-root", type=Path, help="folder of the data; default: synthetic images")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--updates", type=int, default=5, help="updates of a turn: should take about a second")
    parser.add_argument("--quick", action="store_true", help="two rounds of few updates; nothing is written")
    options = parser.parse_args()
    rounds, updates = (2, 2) if options.quick else (options.rounds, options.updates)

    fewest = min(options.processes)
    points = {}  # by mode and processes: where both modes have the same work, one is enough
    for processes in sorted(options.processes):
        points[STRONG, processes] = options.batch_size
        if processes > fewest:
            points[WEAK, processes] = options.batch_size * processes // fewest
    starts: dict[str, Callable[[Path], turns.Contestant]] = {
        f"{mode}, {processes}": partial(_contestant, options, processes, batch_size, updates)
        for (mode, processes), batch_size in points.items()
    }
    with turns.contest(starts) as contestants:
        list(turns.rounds(contestants, WARM_UP))
        measured = list(turns.rounds(contestants, rounds))
    rates: dict[str, dict[int, list[float]]] = {STRONG: {}, WEAK: {}}
    for mode, processes in points:
        rates[mode][processes] = [of_round[f"{mode}, {processes}"] for of_round in measured]
    rates[WEAK] = {fewest: rates[STRONG][fewest], **rates[WEAK]}

    curves = {
        mode: speed_ups({processes: statistics.median(samples) for processes, samples in of_each.items()})
        for mode, of_each in rates.items()
    }
    print_table(*table(curves))
    if options.quick:
        return
    words = [options.recipe, "--batch-size", options.batch_size, "--processes", *options.processes, "--rounds", rounds]
    words += ["--data-root DIR"] if options.data_root else []
    command = " ".join(["python benchmarks/scaling.py", *map(str, words)])
    figures: dict[str, Any] = {
        "circumstances": document.circumstances(command),
        "images_per_second": {
            mode: {str(processes): dataclasses.asdict(spread(samples)) for processes, samples in of_each.items()}
            for mode, of_each in rates.items()
        },
    }
    plot(curves, document.DOCS / "scaling.svg")
    note = (
        f"{options.recipe}, batch {options.batch_size} on {fewest} process{'es' * (fewest > 1)}, "
        f"{'real' if options.data_root else 'synthetic'} images; medians of {rounds} rounds."
    )
    text = "\n".join(
        [*document.table(*table(curves)), "", note, document.caption(figures["circumstances"]), "", "![](scaling.svg)"]
    )
    document.tell("scaling", document.write("scaling", text, figures))


def table(curves: dict[str, list[Point]]) -> tuple[list[str], list[list[str]]]:
    head = ["", "processes", "images/s", "speed-up", "efficiency"]
    rows = []
    for mode, points in curves.items():
        for point in points:
            growth = [f"{point.speed_up:.2f}", f"{point.efficiency:.0%}"]
            rows.append([mode, str(point.processes), f"{point.images_per_second:,.0f}", *growth])
    return head, rows


def _contestant(
    options: argparse.Namespace, processes: int, batch_size: int, updates: int, folder: Path
) -> turns.Contestant:
    """Start the trainer on this number of processes, without checkpoints at the end of epochs."""
    launcher: list[object] = []
    if processes > 1:
        launcher = ["-m", "accelerate.commands.launch", "--config_file", options.config_file]
        launcher += ["--num_processes", processes]
    return trainer(
        options.recipe,
        options.data_root,
        folder,
        batch_size=batch_size,
        updates=updates,
        launcher=launcher,
        words=["--checkpoint.every-epochs", 10_000],
    )


if __name__ == "__main__":
    main()
