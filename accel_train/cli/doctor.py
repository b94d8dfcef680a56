"""`accel-train doctor`: what will go wrong in the next twenty hours of a training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from accel_train.cli.common import importing
from accel_train.config.options import CommandOptions, parse_command_of_recipe
from accel_train.launch.environment import prepare_environment


@dataclass(frozen=True)
class Doctor(CommandOptions):
    """Look for what will go wrong in the next twenty hours: processes, scheduler, GPUs, network, disks, the recipe.

    Start it the way you start the training, with the same options: accelerate launch … -m accel_train doctor RECIPE.
    Each check reports PASS, WARN, FAIL or n/a, the measured and the expected value. If one fails, the exit code is 1.
    """

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")] = "digits"
    """A recipe, as for train."""
    quick: bool = False
    """Run only the quick checks: some seconds in total."""
    seconds: float = 60.0
    """Time limit for all checks together; a check that does not fit is n/a."""
    skip: tuple[str, ...] = ()
    """Names of checks to leave out."""
    drill: bool = False
    """Also kill a training of this recipe, continue it, and compare its weights with those of an uninterrupted one."""
    exit_zero: bool = False
    """Exit with 0 also if a check fails: for job scripts, which go on."""
    json: Path | None = None
    """Write the findings to this file, too."""

    def mistakes(self) -> list[str]:
        mistakes = [] if not (self.quick and self.drill) else ["--drill takes minutes; leave out --quick."]
        mistakes += [] if self.seconds > 0 else [f"--seconds: expected more than 0, found {self.seconds}."]
        if self.json is not None and self.json.is_dir():
            mistakes.append(f"--json: {self.json} is a folder; name a file in it.")
        return mistakes


def doctor(arguments: Sequence[str]) -> int:
    """Run `accel-train doctor`; return the exit code."""
    options, config = parse_command_of_recipe(Doctor, arguments, "accel-train doctor")
    launch = prepare_environment()
    with importing(config.recipe):
        from accel_train.doctor.doctor import doctor
        from accel_train.launch.accelerator import end_world

    seconds = min(options.seconds, 10.0) if options.quick else options.seconds
    code = doctor(
        config,
        launch,
        seconds=seconds,
        quick=options.quick,
        skip=options.skip,
        with_drill=options.drill,
        json_file=options.json,
    )
    end_world()
    return 0 if options.exit_zero else code
