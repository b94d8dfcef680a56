"""`accel-train report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from accel_train.cli.common import importing, not_a_run
from accel_train.config.options import CommandOptions, parse_command
from accel_train.launch.environment import prepare_environment


@dataclass(frozen=True)
class Report(CommandOptions):
    """Write a page about a run: curves, figures, confusion, the worst images. Of several runs: compare them.

    The page is one file that needs no network. If the run has no predictions of its weights yet, the test split (or the
    validation split) is evaluated once, and they are kept in RUN/predictions-SPLIT.npz.
    """

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN …")]
    """Folders of the runs."""
    output: Path | None = None
    """The file to write; default: RUN/report.html, of the first run."""
    no_evaluate: bool = False
    """Do not evaluate: leave out what needs the data."""
    trust_code: bool = False
    """Run the code that the run keeps of its own model and data (RUN/code), although it may be somebody else's."""

    def mistakes(self) -> list[str]:
        return [mistake for run in self.runs for mistake in not_a_run(run)]


def report(arguments: Sequence[str]) -> int:
    """Run `accel-train report`; return the exit code."""
    options, _ = parse_command(Report, arguments, "accel-train report", positional=("runs",))

    launch = prepare_environment()
    with importing(str(options.runs[0])):
        from accel_train.report.report import report

    return report(
        launch,
        options.runs,
        output=options.output,
        evaluates=not options.no_evaluate,
        trust_code=options.trust_code,
    )
