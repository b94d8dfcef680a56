"""What a start costs: CPU seconds and memory of a short training beside a plain script, and of help and a mistake.

    python benchmarks/start.py              # nine turns
    python benchmarks/start.py --turns 3

The plain script imports torch and accelerate and takes one step of SGD. The programs take turns, with one thread each;
their ratio is that within a turn. CPU seconds (user and system, children that have ended included) depend little on
what else the machine does. The second table says which packages the training imports, and for how long.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from accel_train.cli.common import print_table

PLAIN = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(64, 10)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
accelerator.backward(model(torch.rand(32, 64)).square().mean())
optimizer.step()
"""
TRAINING = "train digits --epochs 1"
PROGRAMS = {
    "a plain script": ["-c", PLAIN],
    f"accel-train {TRAINING}": ["-m", "accel_train", *TRAINING.split()],
    "accel-train --help": ["-m", "accel_train", "--help"],
    "accel-train train digits --epohcs 1": ["-m", "accel_train", "train", "digits", "--epohcs", "1"],
}
LEAST_SECONDS = 0.02
"""Packages whose own imports take less are not shown."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9)
    turns = parser.parse_args().turns
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    memory: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(turns):
        for name, words in PROGRAMS.items():
            used, resident = run(words)
            seconds[name].append(used)
            memory[name].append(resident)
    rows = []
    for name, own in seconds.items():
        ratios = [used / plain for used, plain in zip(own, seconds["a plain script"], strict=True)]
        rows.append(
            [name, f"{statistics.median(own):.2f}", f"{statistics.median(ratios):.2f}", f"{max(memory[name]):,.0f}"]
        )
    print_table(["program", "CPU seconds, median", "of the plain script's", "MB resident, most"], rows)
    print()
    imported = imports()
    shown = [[name, f"{used:.2f}"] for name, used in imported.most_common() if used >= LEAST_SECONDS]
    print_table(["imported by the training", "seconds of its own modules"], shown)


def run(words: list[str]) -> tuple[float, float]:
    """CPU seconds and the largest resident memory in MB of a Python program on one thread."""
    with tempfile.TemporaryDirectory() as folder:
        process = start(words, folder, subprocess.DEVNULL)
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0  # it has been waited for
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def imports() -> Counter[str]:
    """The seconds that the training spends on the modules of each package, without what those import."""
    with tempfile.TemporaryDirectory() as folder:
        process = start(["-X", "importtime", *PROGRAMS[f"accel-train {TRAINING}"]], folder, subprocess.PIPE)
        _, report = process.communicate()
    found: Counter[str] = Counter()
    for own, name in re.findall(r"import time: +(\d+) \| +\d+ \| +(\S+)", report.decode()):
        found[name.partition(".")[0]] += int(own) / 1e6  # type: ignore[assignment]  # seconds, not a count
    return found


def start(words: list[str], folder: str, errors: int) -> subprocess.Popen[bytes]:
    more = ["--output-dir", str(Path(folder, "run"))] if "--epochs" in words else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    line = [sys.executable, *words, *more]
    return subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=errors, env=environment, cwd=folder)


if __name__ == "__main__":
    main()
