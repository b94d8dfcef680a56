"""What several commands need: checks of their options, and imports that take long."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from pathlib import Path

from accel_train import __version__
from accel_train.config.option_types import value
from accel_train.config.schema import Config
from accel_train.errors import UserError, print_line
from accel_train.launch.environment import is_first_process


@contextlib.contextmanager
def importing(what: str = "") -> Iterator[None]:
    """Import torch and other large packages within it: the garbage collector is off, which saves a quarter of the time.

    The collector would go through all imported functions and classes again and again, and free none of them. With
    `what` (a recipe or a run), a terminal shows at once that the program has started: importing torch from a slow disk
    takes long.
    """
    if what and sys.stderr.isatty() and is_first_process():
        print_line(f"accel-train {__version__}: {what}; importing torch …", sys.stderr)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def check_makes_no_run(config: Config, command: str, what: str) -> None:
    """Raise UserError if a command that trains no run, and writes only `what`, got an option that is about a run."""
    for key in ("output-dir", "config-only"):
        if value(config, key):
            raise UserError(f"--{key}: an option of train; {command} writes only the {what} that --output names.")


def below_one(**values: int | None) -> list[str]:
    """Return a message for each option whose value is below 1. None, an option without a value, is fine."""
    return [
        f"--{name.replace('_', '-')}: expected at least 1, found {value}."
        for name, value in values.items()
        if value is not None and value < 1
    ]


def not_a_run(run: Path) -> list[str]:
    """Return a message if the folder `run` is not one that training has written; else nothing."""
    if (run / "config.yaml").is_file():
        return []
    reason = "it has no config.yaml" if run.is_dir() else "there is no such folder"
    return [f"{run}: not a run, because {reason}; give the folder that training wrote (runs/RECIPE/…)."]
