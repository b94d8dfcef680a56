"""Stored values that must not change unnoticed: option names, the recipes' settings, and the losses of short runs.

`python tests/golden.py --write` writes the names and settings that hold now into tests/golden/, `--write-runs` the
losses too: to be read in the diff of a change that means to shift them. tests/test_golden.py compares.
"""

from __future__ import annotations

import json
import math
import platform
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import helpers
import torch

from accel_train.config.options import option_types, parse
from accel_train.config.recipe import recipe_names
from accel_train.config.schema import to_yaml

FOLDER = Path(__file__).with_name("golden")
RUNS = {
    "digits": "digits --epochs 2 --data.val-fraction 0.1 --ema.enabled true --ema.decay 0.8",
    "mnist_cnn": "mnist_cnn --epochs 2 --batch-size 64 --log-every-updates 2 --data.name synthetic --data.channels 1 "
    "--model.image-size 28 --data.train-limit 512 --data.test-limit 128",
}
# Where another torch or CPU adds in another order: far more than rounding, far less than what one setting changes.
LOSS, ACCURACY = 2e-3, 0.02

Run = dict[str, dict[str, float]]
"""Name of a line of the log ("train 10", "test ema") -> its loss and accuracy."""


def computed_with() -> dict[str, str]:
    """Return what the bits of a sum of floats depend on: torch, and the CPU type that selects its kernels."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "torch": torch.__version__.partition("+")[0],
        "cpu": cpu,
        "kernels": torch.backends.cpu.get_cpu_capability(),
    }


def options() -> str:
    """Return all option names of `accel-train train`, one per line."""
    return "".join(f"--{name}\n" for name in sorted(option_types()))


def recipe(name: str) -> str:
    """Return all settings of a recipe as YAML."""
    return to_yaml(parse([name]))


def trained(words: str) -> Run:
    """Return the log of a run with these words, in one forked process."""
    with tempfile.TemporaryDirectory() as folder:
        done = helpers.run(*words.split(), "--output-dir", f"{folder}/run")
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    found = {}
    for line in lines:
        if line["kind"] in ("train", "eval"):
            words_of_it = (line["kind"], line.get("split", ""), line.get("weights", ""), line["update"])
            name = " ".join(str(word) for word in words_of_it if word != "")
            found[name] = {"loss": line["loss"], "accuracy": line["accuracy"]}
    return found


def differences(found: Run, stored: Run, *, exact: bool) -> list[str]:
    """Return one line for each difference: in any bit (`exact`), else of more than rounding."""
    different = [f"{name}: not in both" for name in found.keys() ^ stored.keys()]
    for name in found.keys() & stored.keys():
        for figure, value in found[name].items():
            expected = stored[name][figure]
            bounds = {"rel_tol": LOSS} if figure == "loss" else {"rel_tol": 0.0, "abs_tol": ACCURACY}
            same = value == expected if exact else math.isclose(value, expected, **bounds)
            if not same:
                different.append(f"{name}: {figure} {value!r}, stored {expected!r}")
    return sorted(different)


def stored_runs() -> tuple[Mapping[str, Run], dict[str, str]]:
    """Return the stored runs by name, and the torch and CPU that computed them."""
    stored = json.loads((FOLDER / "runs.json").read_text())
    return stored["runs"], stored["computed_with"]


def write(*, with_runs: bool) -> None:
    (FOLDER / "recipes").mkdir(parents=True, exist_ok=True)
    (FOLDER / "options.txt").write_text(options())
    for old in (FOLDER / "recipes").iterdir():
        old.unlink()
    for name in recipe_names():
        (FOLDER / "recipes" / f"{name}.yaml").write_text(recipe(name))
    if not with_runs:
        return
    runs = {"computed_with": computed_with(), "runs": {name: trained(words) for name, words in RUNS.items()}}
    (FOLDER / "runs.json").write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] not in (["--write"], ["--write-runs"]):
        sys.exit("usage: python tests/golden.py --write | --write-runs")
    write(with_runs=sys.argv[1] == "--write-runs")
