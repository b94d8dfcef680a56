"""Whole programs on JPEG files: the default, one virtual batch, shards, timm's train.py, a bare loop.

    python benchmarks/virtual_batches.py FOLDER                            # the trainer with itself, and the bare loop
    python benchmarks/virtual_batches.py FOLDER --timm-train PATH/train.py # of a checkout of timm
    python benchmarks/virtual_batches.py FOLDER --model resnet50 --image-size 224 --batch-size 32 --workers 0
        --shards FOLDER_OF_SHARDS --timm-train PATH/train.py

FOLDER has train/ and test/ with a folder of images for each class. The programs are started as their users start them,
one after the other in each turn; ratios are of the images a second within a turn. The bare loop does forward, backward
and step on one batch in memory, without input and metrics. A busy machine shows: the threads of a program wait for the
one whose core something else has taken.
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

from accel_train.cli.common import print_table

BARE_SECONDS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timm-train", type=Path, help="train.py of a checkout of timm; it is not in timm's package")
    parser.add_argument("--shards", type=Path, help="the same images as `accel-train shards` writes them")
    parser.add_argument("--model", default="resnet18", help="a model of timm")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--loop", action="store_true", help=argparse.SUPPRESS)  # the program that is the bare loop
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.loop:
        print(bare_rate(options))
        return
    folder = ["--data.name", "folder", "--data.root", str(options.folder.resolve())]
    one = ["--virtual-batch-size", str(options.batch_size)]
    programs = {"default": folder, "one virtual batch": [*folder, *one]}
    if options.shards:
        programs["default, from shards"] = ["--data.name", "wds", "--data.root", str(options.shards.resolve())]
    rates: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for turn in range(1, options.turns + 1):
        with tempfile.TemporaryDirectory() as temporary:
            found = {name: trained(options, words, Path(temporary, name)) for name, words in programs.items()}
            if options.timm_train:
                found["timm"] = timm(options, Path(temporary, "timm"))
            found["bare loop"] = bare_loop(options)
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
    data = (
        f"--data.workers {options.workers} --augment.crop resized --augment.flip 0.5 --batch-size {options.batch_size}"
    )
    model = f"--model.name {options.model} --model.image-size {options.image_size} --optim.name momentum --optim.lr 0.1"
    model += f" --augment.resize {options.image_size if options.image_size <= 32 else options.image_size * 8 // 7}"
    line = ["-m", "accel_train.train", "cifar10_resnet18", *data.split(), *model.split(), "--epochs", options.epochs]
    lasted, _ = run([*line, *words, "--output-dir", output])
    return json.loads((output / "result.json").read_text())["images_per_second"], lasted


def classes(options: argparse.Namespace) -> int:
    return len(list((options.folder / "train").iterdir()))


def timm(options: argparse.Namespace, output: Path) -> tuple[float, float]:
    data = f"--train-split train --val-split test --num-classes {classes(options)} --batch-size {options.batch_size}"
    model = f"--model {options.model} --img-size {options.image_size} --color-jitter 0 --opt momentum --lr 0.1"
    line = [options.timm_train, options.folder.resolve(), *data.split(), *model.split(), "--epochs", options.epochs]
    line += ["--device", "cpu", "--workers", options.workers, "--sched", "step", "--output", output]
    lasted, log = run(line)
    # Time: 0.281s,  909.41/s  (0.302s,  846.13/s): of this update, and in brackets of the epoch.
    epochs = dict(re.findall(r"Train: (\d+) .*\([ \d.]+s, +([\d.]+)/s\)", log))  # the last line of each
    return statistics.median(map(float, epochs.values())), lasted


def bare_loop(options: argparse.Namespace) -> tuple[float, float]:
    words = ["--model", options.model, "--image-size", options.image_size, "--batch-size", options.batch_size]
    lasted, log = run([__file__, options.folder, "--loop", *words])
    return float(log), lasted


def bare_rate(options: argparse.Namespace) -> float:
    """The images a second of a loop of forward, backward and step, with the trainer's settings of a CPU."""
    from accel_train.launch.environment import prepare_environment

    prepare_environment()  # before torch is imported
    import timm
    import torch

    from accel_train.optim.performance import set_defaults

    set_defaults(torch.device("cpu"))
    model = timm.create_model(options.model, num_classes=classes(options)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    images = torch.randn(options.batch_size, 3, options.image_size, options.image_size)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(classes(options), (options.batch_size,))
    updates, began = -2, time.monotonic()
    while (lasted := time.monotonic() - began) < BARE_SECONDS or updates <= 0:
        if updates == 0:  # the first two choose kernels
            began = time.monotonic()
        optimizer.zero_grad()
        loss: torch.Tensor = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        updates += 1
    return float(updates * options.batch_size / lasted)


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
