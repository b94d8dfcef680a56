"""Whether the layers that make a run the same everywhere learn as well as torch's own: whole runs, seed by seed.

    python benchmarks/accuracy.py [--seeds N] RECIPE OPTION …

plain        torch's own BatchNorm over the whole micro-batch, torch's own dropout
same run     the default: BatchNorm over virtual batches, dropout by sample

Both runs of a seed begin with the same weights and see the same augmented images. Printed are the test accuracies in
percent, their means, and the mean difference of a seed with its standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from torch import nn

from accel_train import training_setup
from accel_train.cli import main as accel_train
from accel_train.models.batchnorm import VirtualBatches
from accel_train.models.dropout import convert_dropout
from accel_train.models.trial import Verdict

KINDS = "plain", "same run"


def _empty(model: nn.Module) -> nn.Module:
    """What is converted in place of `model`: a module without layers, on its device."""
    nothing = nn.Module()
    nothing.register_parameter("device", next(model.parameters()))
    return nothing


def _leave_as_it_is() -> None:
    """Let training keep the layers of the model."""
    replaced = {
        "VirtualBatches": lambda model, *arguments: VirtualBatches(_empty(model), *arguments),
        "convert_dropout": lambda model, seed: convert_dropout(_empty(model), seed),
        "find_verdict": lambda *_, **__: Verdict(),
    }
    for name, function in replaced.items():
        setattr(training_setup, name, function)


def accuracy(kind: str, words: list[str], seed: int) -> float:
    """The test accuracy in percent of one run, in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory, "run")
        command = [sys.executable, __file__, *words, "--seed", str(seed), "--output-dir", str(run)]
        result = subprocess.run(command, env={**os.environ, "ACCURACY_OF": kind}, stdout=subprocess.DEVNULL)
        if result.returncode:
            sys.exit(result.returncode)
        return 100 * float(json.loads(Path(run, "result.json").read_text())["test_accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    options, words = parser.parse_known_args()
    print(" ".join(words), flush=True)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for seed in range(options.seeds):
        for kind in KINDS:
            found[kind].append(accuracy(kind, words, seed))
        print(f"seed {seed}  " + "  ".join(f"{kind} {found[kind][-1]:.2f}" for kind in KINDS), flush=True)
    for kind, values in found.items():
        print(f"{kind:<10} mean {statistics.mean(values):.2f}")
    differences = [same - plain for plain, same in zip(*found.values(), strict=True)]
    if len(differences) > 1:
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        print(f"same run - plain: {statistics.mean(differences):+.2f} +- {error:.2f}")


if __name__ == "__main__":
    kind = os.environ.get("ACCURACY_OF")
    if kind is None:
        main()
    else:
        if kind == "plain":
            _leave_as_it_is()
        sys.exit(accel_train(["train", *sys.argv[1:]]))
