"""`accel-train bench`: how fast the training is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from accel_train.cli.common import below_one, importing, without_run
from accel_train.cli.table import print_table
from accel_train.config.options import CommandOptions, parse_command_of_recipe
from accel_train.data.sources.root import check_root
from accel_train.errors import UserError, counted, print_line, writing
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
    rounds: int = 5
    """Number of times that everything is measured, in turns."""
    updates: int | None = None
    """Updates of each measurement; default: those of the bare loop in 5 seconds, at least 20."""
    output: Path | None = None
    """JSON file of all figures; default: bench-RECIPE.json. The runs are kept beside it while they are needed."""

    def mistakes(self) -> list[str]:
        return below_one(rounds=self.rounds, updates=self.updates)


def bench(arguments: Sequence[str]) -> int:
    """Run `accel-train bench`; return the exit code."""
    options, config = parse_command_of_recipe(Bench, arguments, "accel-train bench")
    config = without_run(config, arguments, "bench", "file")
    output = options.output or Path(f"bench-{config.recipe}.json")
    if output.is_dir():
        raise UserError(f"--output: {output} is a folder; name a file in it.")

    launch = prepare_environment()
    if launch.world_size == launch.local_world_size:
        try:
            check_root(config.data)
        except UserError as error:
            raise UserError(f"{error} Or measure on synthetic images: --data.name synthetic.") from error
    with importing(config.recipe):
        from accel_train.bench.bench import bench
        from accel_train.launch.agreement import end_world

    figures = bench(launch, config, output.parent, rounds=options.rounds, updates=options.updates).figures
    end_world()
    if launch.rank == 0:
        print_figures(figures)
        with writing("--output", output):
            output.write_text(json.dumps(figures, indent=2) + "\n")
        print_line(f"All figures: {output}")
    return 0


def print_figures(figures: dict[str, Any]) -> None:
    """Print the tables. `figures`: those of a `BenchResult`."""
    names, ratios = {"limit": "limit (bare loop)", "input": "input alone"}, figures["ratios"]
    rows = []
    for key, rate in figures["images_per_second"].items():
        share = ratios.get(f"{key}/limit")
        rows.append([names.get(key, key), *_cells(rate, "{:,.0f}"), *(_cells(share, "{:,.1%}") if share else ["", ""])])
    print_line("")
    head = ["", "images/s", "quartiles", "of the limit", "quartiles "]
    print_table(head, rows, numbers=head[1:])

    update = figures["update_seconds"]["median"]
    print_line("")
    rows = [[name, f"{share * update * 1e3:.3f}", f"{share:.1%}"] for name, share in figures["shares"].items()]
    print_table(["an update", "ms", "share"], [*rows, ["in all", f"{update * 1e3:.3f}", ""]], numbers=["ms", "share"])
    print_line("")
    print_line(f"A checkpoint stops the training for {figures['save_seconds'] * 1e3:.3g} ms")
    print_line(
        f"{counted(figures['processes'], 'process')} on {figures['device']}, {figures['precision']}; "
        f"{figures['division']}; {figures['rounds']} rounds of {figures['updates']} updates, in turns, "
        f"after {figures['warm_up_updates']} updates of warm-up"
    )


def _cells(measured: dict[str, Any], form: str) -> list[str]:
    low, high = form.format(measured["low"]), form.format(measured["high"])
    return [form.format(measured["median"]), f"{low} - {high}"]
