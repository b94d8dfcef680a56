"""`accel-train track`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from accel_train.cli.common import importing
from accel_train.config.options import CommandOptions, parse_command
from accel_train.config.recipe import not_a_run
from accel_train.errors import print_line


@dataclass(frozen=True)
class Track(CommandOptions):
    """Send a run's curves, settings and result to a tracker, for example if the run trained without a network.

    No step is sent twice. To send new steps, run the command again, even while the run is training.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    to: Literal["tensorboard", "wandb", "mlflow"] | None = None
    """The tracker."""

    def mistakes(self) -> list[str]:
        missing = ["--to: name the tracker: tensorboard, wandb or mlflow."] if self.to is None else []
        return [*not_a_run(self.run), *missing]


def track(arguments: Sequence[str]) -> int:
    """Run `accel-train track`; return the exit code."""
    options, _ = parse_command(Track, arguments, "accel-train track", positional=("run",))
    with importing(str(options.run)):
        from accel_train.records.trackers import track
    print_line(track(options.run, str(options.to)))
    return 0
