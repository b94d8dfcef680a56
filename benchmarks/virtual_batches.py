"""Whole programs on JPEG files with data workers: the default, one virtual batch, and timm's train.py.

    python benchmarks/virtual_batches.py FOLDER                            # the trainer with itself
    python benchmarks/virtual_batches.py FOLDER --timm-train PATH/train.py # of a checkout of timm

FOLDER has train/ and test/ with a folder of images for each class. The programs are started as their users start them,
one after the other in each turn; ratios are of the images a second within a turn. A busy machine shows: the threads of
a program wait for the one whose core something else has taken.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from accel_train.cli.table import print_table

BATCH = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timm-train", type=Path, help="train.py of a checkout of timm; it is not in timm's package")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    programs = {"default": [], "one virtual batch": ["--virtual-batch-size", str(BATCH)]}
    rates: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for turn in range(1, options.turns + 1):
        with tempfile.TemporaryDirectory() as folder:
            found = {name: trained(options, words, Path(folder, name)) for name, words in programs.items()}
            if options.timm_train:
                found["timm"] = timm(options, Path(folder, "timm"))
        for name, (rate, lasted) in found.items():
            rates.setdefault(name, []).append(rate)
            seconds.setdefault(name, []).append(lasted)
        shown = ", ".join(f"{name} {rate:,.0f} images/s in {lasted:.1f} s" for name, (rate, lasted) in found.items())
        print(f"turn {turn} of {options.turns}: {shown}", flush=True)
    table = []
    for name, own in rates.items():
        ratios = [default / other for default, other in zip(rates["default"], own, strict=True)]
        figures = statistics.median(own), statistics.median(seconds[name]), statistics.median(ratios)
        table.append([name, f"{figures[0]:,.0f}", f"{figures[1]:.1f}", f"{figures[2]:.2f}"])
    print_table(["program, median", "images/s", "seconds of the command", "the default is"], table)


def trained(options: argparse.Namespace, words: list[str], output: Path) -> tuple[float, float]:
    """The images a second of training, and the seconds of the whole command."""
    data = f"--data.name folder --data.workers {options.workers} --augment.crop resized --augment.flip 0.5"
    model = f"--model.name resnet18 --model.image-size 32 --batch-size {BATCH} --optim.name momentum --optim.lr 0.1"
    line = ["-m", "accel_train.train", "cifar10_resnet18", *data.split(), *model.split(), "--epochs", options.epochs]
    lasted, _ = run([*line, "--data.root", options.folder.resolve(), *words, "--output-dir", output])
    return json.loads((output / "result.json").read_text())["images_per_second"], lasted


def timm(options: argparse.Namespace, output: Path) -> tuple[float, float]:
    data = f"--train-split train --val-split test --num-classes {len(list((options.folder / 'train').iterdir()))}"
    model = f"--model resnet18 --img-size 32 --color-jitter 0 --device cpu --batch-size {BATCH} --opt momentum --lr 0.1"
    line = [options.timm_train, options.folder.resolve(), *data.split(), *model.split(), "--epochs", options.epochs]
    lasted, log = run([*line, "--workers", options.workers, "--sched", "step", "--output", output])
    # Time: 0.281s,  909.41/s  (0.302s,  846.13/s): of this update, and in brackets of the epoch.
    epochs = dict(re.findall(r"Train: (\d+) .*\([ \d.]+s, +([\d.]+)/s\)", log))  # the last line of each
    return statistics.median(map(float, epochs.values())), lasted


def run(line: list[object]) -> tuple[float, str]:
    """The seconds that a Python program takes, and its output."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    began = time.monotonic()
    done = subprocess.run([sys.executable, *map(str, line)], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{line[0]} failed:\n{done.stdout}{done.stderr}")
    return time.monotonic() - began, done.stdout + done.stderr


if __name__ == "__main__":
    main()
