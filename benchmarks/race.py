"""Race to 98.5 % of MNIST's test images: from the command to the end of the test that shows it, start-up and all.

    python benchmarks/race.py --data-root ~/data   # writes docs/benchmarks.md, half an hour on two cores
    python benchmarks/race.py --quick              # few images, one seed, any accuracy; writes nothing

All train the net of PyTorch's MNIST example as that example does: Adadelta with the learning rate 1, times 0.7 after
each epoch, batches of 64, a test on the 10,000 test images after each epoch. `mnist_fast` is another recipe of
accel_train: another net and optimizer, for the same goal. Nothing is told to the programs about the goal; who reads
their output ends them when a test shows it.

For each seed all programs start together and take turns of a second, in random order, while the others are stopped
(turns.py): the time of a program is the sum of its turns. Before the first seed each has run once, for a moment, so
that none has to wait for files that another one finds in memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import document
import tasks
import turns
from compare import OTHERS, script_words
from trainer import data_words

from accel_train.cli.common import print_table
from accel_train.tools.bench import ratio, spread

TASK = "mnist_cnn"
GOAL = 0.985
TURN_SECONDS = 1.0
LOOK_SECONDS = 0.02  # between two looks at what a program has written
QUICK_IMAGES = 1280
NAMES = {  # in the order of the table
    "accel_train": "accel_train, `mnist_cnn`",
    "tutorial": "tutorial script",
    "timm": "timm's loader and loop",
    "Lightning": "Lightning",
    "mnist_fast": "accel_train, `mnist_fast`: another net",
}


@dataclasses.dataclass(frozen=True)
class Test:
    """A test accuracy between 0 and 1, after how many epochs, and after how many seconds of the program's turns."""

    epoch: int
    accuracy: float
    seconds: float


class Racer(turns.Program):
    """A program in the race. `results`: the file to which it writes its test accuracies, as lines of JSON."""

    def __init__(self, words: Sequence[object], log: Path, results: Path) -> None:
        super().__init__(words, log)
        self.results, self.seconds, self.tests = results, 0.0, list[Test]()

    def turn(self, goal: float) -> None:
        """Let it run for a second, or until a test reaches `goal`."""
        begun = time.perf_counter()

        def done() -> bool:
            elapsed = time.perf_counter() - begun
            for epoch, accuracy in tested(self.results)[len(self.tests) :]:
                self.tests.append(Test(epoch, accuracy, self.seconds + elapsed))
            return elapsed >= TURN_SECONDS or self.has_reached(goal)

        self.seconds += self.run(done, LOOK_SECONDS)

    def has_reached(self, goal: float) -> bool:
        return any(test.accuracy >= goal for test in self.tests)


def tested(file: Path) -> list[tuple[int, float]]:
    """Return the epochs and the test accuracies in the output of a script, or in the metrics.jsonl of a run."""
    try:
        text = file.read_text(errors="replace")
    except FileNotFoundError:
        return []
    lines = [json.loads(found) for found in re.findall(r'\{[^{}]*"accuracy"[^{}]*\}', text)]
    # metrics.jsonl has the training's accuracy too: lines of another kind, or of another split.
    return [
        (line["epoch"], line["accuracy"])
        for line in lines
        if line.get("kind", "eval") == "eval" and line.get("split", "test") == "test"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="folder of MNIST in torchvision's layout")
    parser.add_argument("--seeds", type=int, default=5, help="how many: 0, 1, … (default: 5)")
    parser.add_argument("--quick", action="store_true", help="few images, one seed; nothing is written")
    options = parser.parse_args()
    root = tasks.TASKS[TASK].root(options.data_root)
    if root is None and not options.quick:
        sys.exit("The race needs MNIST: give --data-root FOLDER, a folder with torchvision's MNIST/raw in it.")
    command = "python benchmarks/race.py --data-root DIR" + f" --seeds {options.seeds}" * (options.seeds != 5)
    figures: dict[str, Any] = {"circumstances": document.circumstances(command), "seeds": options.seeds}
    starts = programs(root)
    race(starts, seed=0, goal=0.0, images=QUICK_IMAGES)  # warms the files; and all there is of a quick run
    if options.quick:
        return
    figures["programs"] = summary([race(starts, seed, GOAL, images=None) for seed in range(options.seeds)])
    print()
    print_table(*rows(figures["programs"]))
    document.tell("race", document.write("race", markdown(figures), figures))


Start = Callable[[Path, int, int | None], Racer]
"""Starts a program with a folder for its files, a seed, and a number of training images; None: all."""


def programs(root: Path | None) -> dict[str, Start]:
    """Return how each program is started, with the number of workers that compare.py has found to be its fastest."""
    stored = json.loads((document.DOCS / "benchmarks.json").read_text())
    workers = stored["compare"]["tasks"][TASK]["workers"]

    def trainer(recipe: str) -> Start:
        def start(folder: Path, seed: int, images: int | None) -> Racer:
            words = ["-m", "accel_train", "train", recipe, "--seed", seed, "--output-dir", folder / "run"]
            words += data_words(recipe, root)
            words += [] if images is None else ["--data.train-limit", images]
            return Racer(words, folder / "log", folder / "run" / "metrics.jsonl")

        return start

    def script(name: str) -> Start:
        def start(folder: Path, seed: int, images: int | None) -> Racer:
            options = ["--seed", seed, "--evaluate", "--workers", workers[name]]
            options += [] if images is None else ["--images", images]
            words = script_words([*OTHERS[name], *options], TASK, root)
            return Racer(words, folder / "log", folder / "log")

        return start

    starts = {"accel_train": trainer(TASK), "mnist_fast": trainer("mnist_fast")}
    starts |= {name: script(name) for name in ("tutorial", "timm")}
    return starts | ({"Lightning": script("Lightning")} if tasks.has_lightning() else {})


def race(starts: dict[str, Start], seed: int, goal: float, images: int | None) -> dict[str, list[Test]]:
    """Let the programs run in turns until each has reached `goal`. Returns their tests; the last one has reached it."""
    racers: dict[str, Racer] = {}
    with tempfile.TemporaryDirectory() as root:
        try:
            while running := [name for name in starts if name not in racers or not racers[name].has_reached(goal)]:
                for name in random.sample(running, len(running)):
                    if name not in racers:
                        folder = Path(root) / name
                        folder.mkdir()
                        racers[name] = starts[name](folder, seed, images)
                    racer = racers[name]
                    racer.turn(goal)
                    if racer.has_reached(goal):
                        racer.end()
                        last = racer.tests[-1]
                        print(
                            f"seed {seed}: {name} {last.accuracy:.2%} in epoch {last.epoch}, {last.seconds:.1f} s",
                            flush=True,
                        )
        finally:
            for racer in racers.values():
                racer.end()
    return {name: racer.tests for name, racer in racers.items()}


def summary(results: list[dict[str, list[Test]]]) -> dict[str, Any]:
    """Return for each program the seconds to the goal and to the end of the first epoch's test, and the rest."""
    to_goal = {name: [tests[name][-1].seconds for tests in results] for name in results[0]}
    return {
        name: {
            "seconds": dataclasses.asdict(spread(to_goal[name])),
            "smallest and largest": [min(to_goal[name]), max(to_goal[name])],
            "seconds of the first epoch": dataclasses.asdict(spread([tests[name][0].seconds for tests in results])),
            "epochs": [tests[name][-1].epoch for tests in results],
            "accuracies": [tests[name][-1].accuracy for tests in results],
            "divided by accel_train": dataclasses.asdict(ratio(to_goal[name], to_goal["accel_train"])),
        }
        for name in NAMES
        if name in results[0]
    }


def rows(programs: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    head = [
        "",
        "seconds to 98.5 %",
        "of accel_train's",
        "in epochs",
        "accuracy then",
        "seconds to the first test's end",
    ]
    table = []
    for name, figures in programs.items():
        seconds, share = figures["seconds"], figures["divided by accel_train"]
        smallest, largest = figures["smallest and largest"]
        table.append(
            [
                NAMES[name],
                f"{seconds['median']:.1f} ({smallest:.1f} to {largest:.1f})",
                "" if name == "accel_train" else f"{share['median']:.2f}x ({share['low']:.2f} to {share['high']:.2f})",
                ", ".join(map(str, figures["epochs"])),
                f"{statistics.median(figures['accuracies']):.2%}",
                f"{figures['seconds of the first epoch']['median']:.1f}",
            ]
        )
    return head, table


def markdown(figures: dict[str, Any]) -> str:
    note = (
        f"Medians of {figures['seeds']} seeds; in brackets the smallest and the largest, of ratios the quartiles. "
        "The epochs are those of the seeds 0, 1, …"
    )
    return "\n".join(
        [*document.table(*rows(figures["programs"])), "", note, document.caption(figures["circumstances"])]
    )


if __name__ == "__main__":
    main()
