"""What the promises cost a loop of one's own: examples/segmentation.py beside segmentation_plain.py, in turns.

    OMP_NUM_THREADS=1 ACCELERATE_USE_CPU=true python benchmarks/own_loop.py --rounds 3

Images for each second of processor time (a busy machine does not change it much), of the epochs after the first, with
evaluation and saves; then the median and the range of the rounds' ratios to plain Accelerate.
"""

from __future__ import annotations

import argparse
import builtins
import importlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState

EXAMPLES = Path(__file__).parent.parent / "examples"
TRAIN, EPOCHS = 300, 3  # images of an epoch, in both programs
PROGRAMS = {
    "4 images a pass": ("segmentation",),
    "16 images a pass": ("segmentation", "--virtual-batch", "16"),
    "plain": ("segmentation_plain",),
}


def images_per_second(name: str, *words: str) -> float:
    """Run a program of examples/ in this process; return the images it trains in a second of processor time."""
    ends: list[float] = []

    def note(text: object = "", *_: Any, **__: Any) -> None:
        if "test loss" in str(text):
            ends.append(time.process_time())

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    torch.use_deterministic_algorithms(False)
    printed, builtins.print = builtins.print, note
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = [name, "--output-dir", f"{folder}/run", "--epochs", str(EPOCHS), *words]
        try:
            importlib.import_module(name).main()
        finally:
            builtins.print = printed
    return TRAIN * (EPOCHS - 1) / (ends[-1] - ends[0])


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare examples/segmentation.py with plain Accelerate.")
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    sys.path.insert(0, str(EXAMPLES))
    torch.set_num_threads(1)
    speeds: dict[str, list[float]] = {label: [] for label in PROGRAMS}
    for _ in range(rounds):
        for label, program in PROGRAMS.items():
            speeds[label].append(images_per_second(*program))
    for label, found in speeds.items():
        ratios = [one / other for one, other in zip(found, speeds["plain"], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{label}: {statistics.median(found):.0f} images/s, {spread} of plain")


if __name__ == "__main__":
    main()
