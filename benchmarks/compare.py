"""Compare the speed of the trainer with that of other programs that do the same work, and write one table.

    python benchmarks/compare.py --data-root ~/data      # as `make bench` does
    python benchmarks/compare.py --quick                 # check that everything runs; writes nothing

Each program (a contestant) is started as its users start it. In each round, each contestant runs for half a second
while the others are stopped (turns.py), and ratios are computed within a round. For the other programs, a few rounds
before the measurement show whether 0 or 2 workers are faster. Without --data-root the images are synthetic, with the
same shapes. The table is written to docs/benchmarks.md, the figures to docs/benchmarks.json, the plot to that folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import document
import tasks
import turns
from trainer import trainer

from accel_train.cli.common import print_table
from accel_train.tools.bench import ratio, spread
from accel_train.tools.report.curves import import_pyplot

HERE = Path(__file__).parent
SECOND_PASS = "tutorial's second pass"
OTHERS = {  # each with 0 and 2 workers
    "tutorial": ["tutorial.py"],
    SECOND_PASS: ["tutorial.py", "--second-pass"],
    "timm": ["timm_loader.py"],
    "Lightning": ["lightning_script.py"],
}
NAMES = {  # in the order of the table
    "limit": "limit: a bare loop on tensors in memory",
    "trainer": "accel_train, all on",
    "tutorial": "tutorial script, without its second pass",
    "tutorial, second pass": "tutorial script, second pass included",
    "timm": "timm's loader and loop",
    "Lightning": "Lightning",
}
TRIALS = 5  # rounds that choose the number of workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="folder of MNIST and CIFAR10 in torchvision's layout")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="two rounds of few updates; nothing is written")
    options = parser.parse_args()
    rounds = 2 if options.quick else options.rounds
    command = f"python benchmarks/compare.py --rounds {rounds}" + " --data-root DIR" * bool(options.data_root)
    figures: dict[str, Any] = {"circumstances": document.circumstances(command), "rounds": rounds}
    measured = {}
    for name, task in tasks.TASKS.items():
        root = task.root(options.data_root)
        measured[name] = _measure(name, task, root, rounds, 2 if options.quick else tasks.turn(task))
        measured[name]["data"] = "synthetic" if root is None else "real"
    figures["tasks"] = measured
    show(measured)
    if options.quick:
        return
    plot(measured, document.DOCS / "benchmarks.svg")
    document.tell("compare", document.write("compare", markdown(figures), figures))


def _measure(name: str, task: tasks.Task, root: Path | None, rounds: int, updates: int) -> dict[str, Any]:
    """Return the images per second of all contestants and the trainer's ratio to each, with quartiles."""
    starts: dict[str, Callable[[Path], turns.Contestant]] = {
        "limit": partial(_script, ["limit.py"], name, task, root, updates),
        "trainer": partial(trainer, name, root, batch_size=task.batch_size, updates=updates),
    }
    others = [other for other in OTHERS if other != "Lightning" or tasks.has_lightning()]
    for other in others:
        for workers in (0, 2):
            words = [*OTHERS[other], "--workers", workers]
            starts[f"{other} {workers}"] = partial(_script, words, name, task, root, updates)
    rates: dict[str, list[float]] = {}
    with turns.contest(starts) as contestants:
        trials = list(turns.rounds(contestants, TRIALS))
        workers_of = {}
        for other in others:
            median = {workers: statistics.median(trial[f"{other} {workers}"] for trial in trials) for workers in (0, 2)}
            best = workers_of[other] = max(median, key=lambda workers: median[workers])
            contestants[other] = contestants.pop(f"{other} {best}")
            contestants.pop(f"{other} {2 - best}").end()
        for number, of_round in enumerate(turns.rounds(contestants, rounds), 1):
            of_round["tutorial, second pass"] = 1 / (1 / of_round["tutorial"] + 1 / of_round.pop(SECOND_PASS))
            for contestant, rate in of_round.items():
                rates.setdefault(contestant, []).append(rate)
            shown = ", ".join(f"{contestant} {rate:,.0f}" for contestant, rate in of_round.items())
            print(f"{name}, round {number} of {rounds}: {shown}", flush=True)
    return {
        "batch_size": task.batch_size,
        "updates": updates,
        "workers": workers_of,
        "images_per_second": {key: dataclasses.asdict(spread(rates[key])) for key in NAMES if key in rates},
        "divided by the limit": {
            key: dataclasses.asdict(ratio(rates[key], rates["limit"]))
            for key in NAMES
            if key in rates and key != "limit"
        },
        "trainer divided by": {
            key: dataclasses.asdict(ratio(rates["trainer"], rates[key]))
            for key in NAMES
            if key in rates and key != "trainer"
        },
    }


def script_words(words: Sequence[object], name: str, root: Path | None) -> list[object]:
    """Return the arguments of python for a script and its options: on the task `name`, with the data in `root`."""
    script, *options = words
    return [HERE / str(script), name, *options, *(["--data-root", root] if root else [])]


def _script(
    words: Sequence[object], name: str, task: tasks.Task, root: Path | None, updates: int, folder: Path
) -> turns.Contestant:
    line = [*script_words(words, name, root), "--every", updates]
    return turns.Contestant(line, folder / "log", updates=updates, images=task.batch_size)


def rows(measured: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table, two columns per task."""
    head = [""]
    for name, figures in measured.items():
        head += [f"{name}, batch {figures['batch_size']}: images/s", "trainer is"]
    table = []
    for key, name in NAMES.items():
        if not any(key in figures["images_per_second"] for figures in measured.values()):
            continue
        workers = dict.fromkeys(figures["workers"].get(key.partition(",")[0]) for figures in measured.values())
        row = [name + (f" ({' and '.join(map(str, workers))} workers)" if None not in workers else "")]
        for figures in measured.values():
            rate = figures["images_per_second"].get(key)
            share = figures["trainer divided by"].get(key)
            row.append(f"{rate['median']:,.0f} ({rate['low']:,.0f} to {rate['high']:,.0f})" if rate else "")
            row.append(f"{share['median']:.2f}x ({share['low']:.2f} to {share['high']:.2f})" if share else "")
        table.append(row)
    return head, table


def show(measured: dict[str, Any]) -> None:
    head, table = rows(measured)
    print()
    print_table(head, table)


def markdown(figures: dict[str, Any]) -> str:
    head, table = rows(figures["tasks"])
    data = ", ".join(f"{name}: {task['data']} images" for name, task in figures["tasks"].items())
    note = f"Medians of {figures['rounds']} rounds, in brackets their quartiles. {data}."
    return "\n".join(
        [*document.table(head, table), "", note, document.caption(figures["circumstances"]), "", "![](benchmarks.svg)"]
    )


def plot(measured: dict[str, Any], path: Path) -> None:
    """Draw the share of the limit that each contestant reaches as bars, with the quartiles as lines on them.

    `measured`: as docs/benchmarks.json has it.
    """
    width = 5 * len(measured)
    figure, axes = import_pyplot().subplots(1, len(measured), figsize=(width, 3.2), layout="constrained")
    for axis, (name, figures) in zip(axes, measured.items(), strict=True):
        shares = figures["divided by the limit"]
        medians = [share["median"] for share in shares.values()]
        below = [share["median"] - share["low"] for share in shares.values()]
        above = [share["high"] - share["median"] for share in shares.values()]
        colours = ["#6aaee6" if key == "trainer" else "#b0b8c0" for key in shares]
        bars = axis.barh(list(shares), medians, xerr=[below, above], color=colours)
        axis.bar_label(bars, [f"{share:.0%}" for share in medians], label_type="center")
        axis.axvline(1, color="black", linewidth=1, linestyle="--")
        axis.set(title=f"{name}, batch {figures['batch_size']}", xlabel="share of the limit", xlim=(0, 1.25))
        axis.invert_yaxis()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
