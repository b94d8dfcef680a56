"""Compare the ways in which OpenMP's threads wait for work on a CPU, by the time of an update.

    python benchmarks/waiting.py                  # both tasks, as `make bench` does
    python benchmarks/waiting.py mnist_cnn --rounds 5

Each way is measured alone, and next to a process that keeps one core busy. The table is written to docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import document
import tasks
import torch
import turns
from torch import nn

from accel_train.cli.common import print_table
from accel_train.launch.environment import SPINS
from accel_train.optim.performance import set_defaults
from accel_train.tools.bench import ratio, spread

ASLEEP = "sleep at once"
WAYS = {  # what a thread does when it has no work, and the environment variables for it
    ASLEEP: {"OMP_WAIT_POLICY": "PASSIVE"},
    f"accel_train: look {SPINS} times, then sleep": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": SPINS},
    "torch by itself: look for 3 ms, then sleep": {},
}
UPDATES = {"mnist_cnn": 20, "cifar10_resnet18": 2}  # in a turn of half a second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="*", help=f"one or more of {', '.join(UPDATES)}; default: all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--loop", choices=UPDATES, help=argparse.SUPPRESS)  # one of the compared processes
    options = parser.parse_args()
    if unknown := [task for task in options.task if task not in UPDATES]:
        parser.error(f"no task {unknown[0]!r}: choose from {', '.join(UPDATES)}")
    if options.loop:
        loop(options.loop)
    figures: dict[str, Any] = {
        "circumstances": document.circumstances(f"python benchmarks/waiting.py --rounds {options.rounds}"),
        "rounds": options.rounds,
    }
    head, table = ["threads", "net", "alone: ms per update", "times", "beside a neighbour: ms", "times"], []
    for task in options.task or UPDATES:
        alone = measure(task, options.rounds)
        with neighbour():
            beside = measure(task, options.rounds)
        for way in WAYS:
            row = [way, task]
            for seconds in (alone, beside):
                times = ratio(seconds[way], seconds[ASLEEP])
                row.append(f"{spread(seconds[way]).median * 1e3:.1f}")
                row.append(f"{times.median:.2f} ({times.low:.2f} to {times.high:.2f})")
            table.append(row)
        figures[task] = {
            name: {way: dataclasses.asdict(ratio(seconds[way], seconds[ASLEEP])) for way in WAYS}
            for name, seconds in (("alone", alone), ("beside a neighbour", beside))
        }
    print_table(head, table)
    if options.task:
        return
    note = f"Medians of {options.rounds} rounds; times: of the update with threads that sleep at once, with quartiles."
    text = "\n".join([*document.table(head, table), "", note, document.caption(figures["circumstances"])])
    document.tell("waiting", document.write("waiting", text, figures))


def measure(task: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds per update of each way. The ways take turns."""

    def start(variables: dict[str, str], folder: Path) -> turns.Contestant:
        line = [__file__, "--loop", task]
        images = tasks.TASKS[task].batch_size
        return turns.Contestant(line, folder / "log", updates=UPDATES[task], images=images, variables=variables)

    with turns.contest({way: partial(start, variables) for way, variables in WAYS.items()}) as contestants:
        measured = list(turns.rounds(contestants, rounds))
    return {way: [tasks.TASKS[task].batch_size / rates[way] for rates in measured] for way in WAYS}


def loop(task: str) -> NoReturn:
    """Update in a bare loop, until the process is killed."""
    set_defaults(torch.device("cpu"))
    description = tasks.TASKS[task]
    model = tasks.net(task)
    optimizer, criterion = tasks.torch_optimizer(task, model), nn.CrossEntropyLoss()
    images = torch.randn(description.batch_size, description.channels, description.size, description.size)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (description.batch_size,))
    progress = tasks.Progress(description, UPDATES[task])
    while True:
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        optimizer.step()
        progress.advance()


@contextlib.contextmanager
def neighbour() -> Iterator[None]:
    """Keep one core busy with another process."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
