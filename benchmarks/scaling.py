"""Images a second over the number of processes: with the recipe's batch shared by all of them (strong scaling), and
with the same batch for each (weak scaling).

    python benchmarks/scaling.py            # mnist_cnn on 1 and 2 processes of this machine's CPU
    python benchmarks/scaling.py cifar10_resnet18_sota --processes 1 2 4 8 --batch-size 1024 \\
        --config-file accelerate_configs/multi_gpu.yaml

Each point is the trainer's speed as `accel-train bench` finds it under accelerate's launcher, in turns. The table goes
into docs/benchmarks.md, the figures into docs/benchmarks.json, the plot beside them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import document

from accel_train.scaling import Point, plot, speed_ups
from accel_train.spread import spread
from accel_train.table import print_table

STRONG, WEAK = "fixed global batch", "fixed batch a process"
CPU = document.ROOT / "accelerate_configs" / "multi_cpu.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="mnist_cnn")
    parser.add_argument("--batch-size", type=int, default=256, help="of the fewest processes together")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--config-file", type=Path, default=CPU, help="of accelerate")
    parser.add_argument("--data-root", type=Path, help="folder of the data; default: synthetic images")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--quick", action="store_true", help="one round of few updates; nothing is written")
    options = parser.parse_args()
    rounds, updates = (1, 8) if options.quick else (options.rounds, options.updates)

    fewest = min(options.processes)
    rates: dict[str, dict[int, list[float]]] = {mode: {} for mode in (STRONG, WEAK)}
    for number in range(rounds):
        for processes in sorted(options.processes):
            for mode, of_each in rates.items():
                if mode == WEAK and processes == fewest:  # the same work
                    of_each.setdefault(processes, []).append(rates[STRONG][processes][-1])
                    continue
                batch_size = options.batch_size * (processes if mode == WEAK else fewest) // fewest
                of_each.setdefault(processes, []).append(_rate(options, processes, batch_size, updates))
        print(f"round {number + 1} of {rounds} is done", flush=True)

    curves = {
        mode: speed_ups({processes: statistics.median(found) for processes, found in of_each.items()})
        for mode, of_each in rates.items()
    }
    print_table(*table(curves))
    if options.quick:
        return
    words = [options.recipe, "--batch-size", options.batch_size, "--processes", *options.processes]
    words += ["--data-root DIR"] if options.data_root else []
    command = " ".join(["python benchmarks/scaling.py", *map(str, words)])
    figures: dict[str, Any] = {
        "circumstances": document.circumstances(command),
        "images_per_second": {
            mode: {str(processes): dataclasses.asdict(spread(found)) for processes, found in of_each.items()}
            for mode, of_each in rates.items()
        },
    }
    (document.DOCS / "scaling.svg").write_text(plot(curves))
    head, rows = table(curves)
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]
    note = (
        f"{options.recipe}, batch {options.batch_size} on {fewest} process{'es' * (fewest > 1)}, "
        f"{'real' if options.data_root else 'synthetic'} images; medians of {rounds} rounds."
    )
    text = "\n".join([*lines, "", note, document.caption(figures["circumstances"]), "", "![](scaling.svg)"])
    document.tell("scaling", document.write("scaling", text, figures))


def table(curves: dict[str, list[Point]]) -> tuple[list[str], list[list[str]]]:
    head = ["", "processes", "images/s", "speed-up", "efficiency"]
    rows = []
    for mode, points in curves.items():
        for point in points:
            growth = [f"{point.speed_up:.2f}", f"{point.efficiency:.0%}"]
            rows.append([mode, str(point.processes), f"{point.images_per_second:,.0f}", *growth])
    return head, rows


def _rate(options: argparse.Namespace, processes: int, batch_size: int, updates: int) -> float:
    """The trainer's images a second, of all processes together."""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", options.config_file, "--num_processes", processes]
    start = [*launcher, "-m", "accel_train"] if processes > 1 else ["-m", "accel_train"]
    data = ["--data.root", options.data_root] if options.data_root else ["--synthetic"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "bench.json"
        words = ["--batch-size", batch_size, "--rounds", 1, "--updates", updates, "--output", output, *data]
        line = [sys.executable, *map(str, [*start, "bench", options.recipe, *words])]
        done = subprocess.run(line, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise SystemExit(f"{' '.join(line)} failed:\n{done.stderr[-2000:]}")
        rate: float = json.loads(output.read_text())["images_per_second"]["trainer"]["median"]
    return rate


if __name__ == "__main__":
    main()
