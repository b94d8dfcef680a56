"""Run everything that needs a GPU: the tests marked gpu, then the trainer's speed compared with the device's limit.

    python benchmarks/gpu.py

It takes half an hour on one GPU. Copy the output after the line BEGIN to docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import document

ROOT = Path(__file__).parent.parent
RECIPES = ("mnist_cnn", "cifar10_fast", "cifar10_resnet18_sota", "imagenet_resnet50")


def main() -> int:
    """Return 1 if a test or a measurement fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", nargs="*", default=RECIPES, help="recipes to measure, on synthetic images")
    parser.add_argument("--precision", default="bf16", help="no, bf16 or fp16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, help="updates of each measurement; default: as many as take 5 seconds")
    options = parser.parse_args()
    tests = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "tests/integration/test_gpu.py"]
    failed = subprocess.run(tests, cwd=ROOT).returncode != 0
    command = shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
    caption = document.caption(document.circumstances(command))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for recipe in options.recipes:
            file = Path(folder) / f"{recipe}.json"
            words = ["bench", recipe, "--synthetic", "--rounds", str(options.rounds), "--output", str(file)]
            words += ["--updates", str(options.updates)] if options.updates else []
            launcher = ["accelerate.commands.launch", "--mixed_precision", options.precision, "--num_processes", "1"]
            launcher += ["--num_machines", "1", "--dynamo_backend", "no", "-m", "accel_train"]
            if subprocess.run([sys.executable, "-m", *launcher, *words], cwd=ROOT).returncode:
                failed = True
                continue
            figures = json.loads(file.read_text())
            speed, share = figures["images_per_second"], figures["ratios"]["trainer/limit"]
            rows.append(
                [
                    f"{recipe}, batch {figures['batch_size']}, {figures['precision']}",
                    f"{speed['limit']['median']:,.0f}",
                    f"{speed['trainer']['median']:,.0f}",
                    f"{share['median']:.3f} ({share['low']:.3f} to {share['high']:.3f})",
                ]
            )
    head = ["recipe, synthetic images", "limit: images/s", "trainer: images/s", "trainer / limit (quartiles)"]
    print("\nBEGIN", *document.table(head, rows), "", sep="\n")
    print(f"Medians of {options.rounds} rounds; the tests marked gpu {'failed' if failed else 'passed'}.")
    print(caption)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
