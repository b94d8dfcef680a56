"""`accel-train doctor`: what will go wrong in the next twenty hours of a training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from accel_train.cli.common import importing
from accel_train.cli.table import print_table
from accel_train.config.options import CommandOptions, parse_command_of_recipe
from accel_train.errors import print_line, writing
from accel_train.files import atomic_write
from accel_train.launch.environment import prepare_environment

if TYPE_CHECKING:
    from accel_train.doctor.doctor import Diagnosis


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
        from accel_train.launch.agreement import end_world

    seconds = min(options.seconds, 10.0) if options.quick else options.seconds
    diagnosis = doctor(launch, config, seconds=seconds, quick=options.quick, skip=options.skip, drill=options.drill)
    end_world()
    if launch.rank == 0:
        print_diagnosis(diagnosis)
        if options.json is not None:
            checks = [{"name": name, **asdict(finding)} for name, finding in diagnosis.findings.items()]
            with writing("--json", options.json):
                atomic_write(options.json, json.dumps({"checks": checks}, indent=2) + "\n")
    return int(diagnosis.failed and not options.exit_zero)


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print a table of what the checks have found, what to do, and how many found what."""
    found = diagnosis.findings
    rows = [[finding.status, name, finding.measured, finding.expected] for name, finding in found.items()]
    print_table(("status", "check", "measured", "expected"), rows)
    for name, finding in found.items():
        if finding.advice and finding.status in ("WARN", "FAIL"):
            print_line(f"{finding.status} {name}: {finding.advice}")
    statuses = [finding.status for finding in found.values()]
    counted = [f"{statuses.count(status)} {status}" for status in ("FAIL", "WARN", "PASS", "n/a") if status in statuses]
    print_line(f"{', '.join(counted)} in {diagnosis.seconds:.0f} s")
