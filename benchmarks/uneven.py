"""Measure what it costs that processes cannot share a batch evenly: 8 virtual batches on 3 processes are 3, 3 and 2.

    python benchmarks/uneven.py            # cifar10_fast on 3 processes of this machine's CPU
    python benchmarks/uneven.py mnist_cnn --config-file accelerate_configs/multi_gpu.yaml

Each is `accel-train train` under accelerate's launcher; they take turns (turns.py). What is compared are images per
second with the nearest larger batch that has no empty slot. The table is written to docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import document
import turns
from scaling import CPU, WARM_UP
from trainer import trainer

from accel_train.bench.workload import spread
from accel_train.cli.table import print_table

UNITS = 8  # virtual batches of an update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="cifar10_fast")
    parser.add_argument("--virtual-batch", type=int, default=16, help="images of a virtual batch")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--config-file", type=Path, default=CPU, help="accelerate's config file")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="two rounds; nothing is written")
    options = parser.parse_args()

    slots = -(-UNITS // options.processes) * options.processes
    starts: dict[str, Callable[[Path], turns.Contestant]] = {
        f"{mode}, {units}": partial(_contestant, options, units, bitwise=mode == "--bitwise")
        for mode in ("default", "--bitwise")
        for units in (UNITS, slots)
    }
    with turns.contest(starts) as contestants:
        list(turns.rounds(contestants, WARM_UP))
        measured = list(turns.rounds(contestants, 2 if options.quick else options.rounds))
    rows = []
    for mode in ("default", "--bitwise"):
        ratio = spread([of_round[f"{mode}, {UNITS}"] / of_round[f"{mode}, {slots}"] for of_round in measured])
        even = statistics.median(of_round[f"{mode}, {slots}"] for of_round in measured)
        rows.append([mode, f"{even:,.0f}", f"{1 - UNITS / slots:.0%}", f"{1 - ratio.median:.0%}"])
    head = ["", "images/s, shared evenly", "slots that are empty", "images/s lost"]
    print_table(head, rows)
    if options.quick:
        return
    command = f"python benchmarks/uneven.py {options.recipe} --virtual-batch {options.virtual_batch}"
    command += f" --processes {options.processes} --rounds {options.rounds}"
    figures: dict[str, Any] = {"circumstances": document.circumstances(command), "rows": rows}
    text = [*document.table(head, rows), "", document.caption(figures["circumstances"])]
    document.tell("uneven", document.write("uneven", "\n".join(text), figures))


def _contestant(options: argparse.Namespace, units: int, folder: Path, *, bitwise: bool) -> turns.Contestant:
    size = units * options.virtual_batch
    words: list[object] = ["--checkpoint.every-epochs", 10_000, "--virtual-batch-size", options.virtual_batch]
    words += ["--micro-batch-size", options.virtual_batch, "--bitwise", str(bitwise).lower()]
    launcher = ["-m", "accelerate.commands.launch", "--config_file", options.config_file]
    launcher += ["--num_processes", options.processes]
    return trainer(options.recipe, None, folder, batch_size=size, updates=3, launcher=launcher, words=words)


if __name__ == "__main__":
    main()
