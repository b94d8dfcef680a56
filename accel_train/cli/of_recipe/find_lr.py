"""`accel-train find-lr`: a range test of the learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from accel_train.cli.common import importing, without_run, wrong_endings
from accel_train.config.options import CommandOptions, parse_command_of_recipe
from accel_train.data.sources.root import check_root
from accel_train.errors import LOGGER, UserError, print_line, writing
from accel_train.files import check_writable
from accel_train.launch.environment import prepare_environment


@dataclass(frozen=True)
class FindLr(CommandOptions):
    """Train for some updates while the learning rate grows, and draw the loss: where it falls fastest is a good rate.

    Options of train (--batch-size, --optim.name, …) change the recipe. Nothing is kept but the picture.
    """

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")]
    """A recipe, as for train."""
    updates: int = 100
    """How many updates, at least 10. The rate grows by the same factor at each, from 1e-6 to 10."""
    output: Path | None = None
    """The picture, as SVG; default: lr-RECIPE.svg."""

    def mistakes(self) -> list[str]:
        return wrong_endings([".svg"], output=self.output)


def find_lr(arguments: Sequence[str]) -> int:
    """Run `accel-train find-lr`; return the exit code: 1 if the loss does not fall."""
    options, config = parse_command_of_recipe(FindLr, arguments, "accel-train find-lr")
    config = without_run(config, arguments, "find-lr", "picture")
    output = options.output or Path(f"lr-{config.recipe}.svg")
    launch = prepare_environment()
    if launch.rank == 0:
        check_writable("--output", output)
    if launch.world_size == launch.local_world_size:
        check_root(config.data)
    with importing(config.recipe):
        from accel_train.bench.lr_finder import find_lr, plot
        from accel_train.launch.agreement import end_world

    found = find_lr(launch, config, updates=options.updates)
    end_world()
    if launch.rank != 0:
        return 0
    try:
        with writing("--output", output):
            plot(found, output)
        print_line(f"picture: {output}")
    except UserError as error:
        LOGGER.warning(str(error))
    if found.steepest is None:
        print_line("The loss does not fall: look at the data and the recipe.")
        return 1
    print_line(f"It falls fastest at {found.steepest:.2g}. Try --optim.lr {found.steepest:.2g}, with a warm-up.")
    return 0
