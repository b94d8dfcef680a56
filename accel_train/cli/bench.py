"""`accel-train bench` and `accel-train scaling`: how fast the training is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from accel_train.cli.common import below_one, importing
from accel_train.config.options import CommandOptions, parse_command, parse_command_of_recipe
from accel_train.config.schema import value
from accel_train.errors import UserError
from accel_train.launch.environment import prepare_environment


@dataclass(frozen=True)
class Bench(CommandOptions):
    """Measure how close a recipe's training comes to the device's limit, and where the rest of the time goes.

    Measures, in turns: a bare loop on tensors in the device's memory, the input alone, and the whole trainer. Options
    of train (--batch-size, --data.root, …) change the recipe. With several processes: accelerate launch … -m
    accel_train bench RECIPE. The exit code does not depend on the speed.
    """

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")]
    """A recipe, as for train."""
    synthetic: bool = False
    """Use synthetic images of the same size, number and classes (for folders: data.classes)."""
    rounds: int = 5
    """Number of times that everything is measured, in turns."""
    updates: int | None = None
    """Updates of each measurement; default: those of the bare loop in 5 seconds, at least 20."""
    output: Path | None = None
    """JSON file of all figures; default: bench-RECIPE.json. The runs are kept beside it while they are needed."""

    def mistakes(self) -> list[str]:
        mistakes = below_one(rounds=self.rounds, updates=self.updates)
        if self.output is not None and self.output.is_dir():
            mistakes.append(f"--output: {self.output} is a folder; name a file in it.")
        return mistakes


@dataclass(frozen=True)
class Scaling(CommandOptions):
    """Compare finished runs of one recipe on different numbers of processes: speed-up and efficiency.

    Writes scaling.csv and scaling.svg beside the first run.
    """

    runs: Positional[tuple[Path, ...]]
    """Folders of the runs."""


def bench(arguments: Sequence[str]) -> int:
    """Run `accel-train bench`; return the exit code."""
    options, config = parse_command_of_recipe(Bench, arguments, "accel-train bench")
    for key in ("output-dir", "config-only"):
        if value(config, key):
            raise UserError(f"--{key}: an option of train; bench writes only the file that --output names.")
    output = options.output or Path(f"bench-{config.recipe}.json")
    if output.is_dir():
        raise UserError(f"--output: {output} is a folder; name a file in it.")

    launch = prepare_environment()
    with importing(config.recipe):
        from accel_train.bench.bench import bench
        from accel_train.launch.accelerator import end_world

    code = bench(config, launch, output, synthetic=options.synthetic, rounds=options.rounds, updates=options.updates)
    end_world()
    return code


def scaling(arguments: Sequence[str]) -> int:
    """Run `accel-train scaling`; return the exit code."""
    options, _ = parse_command(Scaling, arguments, "accel-train scaling", positional=("runs",))

    from accel_train.bench.scaling import compare

    return compare(options.runs)
