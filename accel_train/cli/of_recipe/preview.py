"""`accel-train preview`: the images that a model will see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from accel_train.cli.common import below_one, importing, without_run
from accel_train.config.options import CommandOptions, parse_command_of_recipe
from accel_train.data.sources.root import check_root
from accel_train.errors import print_line
from accel_train.launch.environment import prepare_environment


@dataclass(frozen=True)
class Preview(CommandOptions):
    """Write a picture of what the model of a recipe will see: images cropped, augmented, mixed, with their labels.

    Options of train (--augment.policy, --data.root, …) change the recipe. Nothing is trained.
    """

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")]
    """A recipe, as for train."""
    images: int = 8
    """How many training images to show."""
    output: Path | None = None
    """The PNG file to write; default: preview-RECIPE.png."""

    def mistakes(self) -> list[str]:
        return below_one(images=self.images)


def preview(arguments: Sequence[str]) -> int:
    """Run `accel-train preview`; return the exit code."""
    options, config = parse_command_of_recipe(Preview, arguments, "accel-train preview")
    config = without_run(config, arguments, "preview", "picture")
    launch = prepare_environment()
    check_root(config.data)
    with importing(config.recipe):
        from accel_train.report.preview import preview

    result = preview(launch, config, options.output or Path(f"preview-{config.recipe}.png"), images=options.images)
    print_line(f"preview: {result.path}")
    return 0
