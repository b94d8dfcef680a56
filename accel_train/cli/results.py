"""Commands that write what a run has come to: `accel-train report`, `export` and `track`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from accel_train.cli.common import importing
from accel_train.cli.runs import run_folders
from accel_train.cli.table import print_table
from accel_train.config.declaration import RUN, Word
from accel_train.config.options import CommandOptions, parse_command
from accel_train.config.recipe import not_a_run
from accel_train.errors import UserError, print_line
from accel_train.launch.environment import prepare_environment


@dataclass(frozen=True)
class Report(CommandOptions):
    """Write a page about a run: curves, figures, confusion, the worst images. Of several runs: compare them.

    The page is one file that needs no network. If the run has no predictions of its weights yet, the test split (or the
    validation split) is evaluated once, and they are kept in RUN/predictions-SPLIT.npz. Several runs are compared by
    what they have written: metrics, means over seeds, Welch's test, speed; a CSV file beside the page has the numbers.
    """

    runs: Annotated[tuple[Path, ...], Word("RUN …")]
    """Folders of the runs, or folders with runs in them, such as one of accel-train submit."""
    output: Path | None = None
    """The file to write; default: report.html in the run, or in the folder of runs; of several RUNs comparison.html in
    the first one."""
    checkpoint: Path | None = None
    """best (by --best-metric on the validation split), last, or a checkpoint such as update-00001234; default: last,
    the final model, or the newest checkpoint of a run that has not finished."""
    no_evaluate: bool = False
    """Do not evaluate: leave out what needs the data."""
    trust_code: bool = False
    """Execute the code that the run keeps (RUN/code) and fetch the data that it names; read both first."""

    def mistakes(self) -> list[str]:
        return [mistake for run in self.all_runs() for mistake in not_a_run(run)]

    def all_runs(self) -> list[Path]:
        """Return the folders of the runs that have begun. One without any runs stands for itself."""
        found: list[Path] = []
        for path in self.runs:
            inside = [] if (path / "config.yaml").exists() else sorted(run_folders(path))
            found += [run for run in inside if (run / "config.yaml").exists()] or [path]
        return found

    def default_output(self) -> Path:
        """Several runs do not take the place of the report of the first of them."""
        several = len({run.resolve() for run in self.runs}) > 1 and (self.runs[0] / "config.yaml").exists()
        return self.runs[0] / ("comparison.html" if several else "report.html")


def report(arguments: Sequence[str]) -> int:
    """Run `accel-train report`; return the exit code."""
    options, _ = parse_command(Report, arguments)

    launch = prepare_environment()
    with importing(str(options.runs[0])):
        from accel_train.tools.report.report import report

    result = report(
        launch,
        options.all_runs(),
        output=options.output or options.default_output(),
        evaluates=not options.no_evaluate,
        checkpoint=options.checkpoint,
        trust_code=options.trust_code,
    )
    for table in result.tables:
        print_line(f"{table.title}:")
        print_table(table.head, table.rows)
        print_line("")
    print_line(f"report: {result.path}")
    if result.csv is not None:
        print_line(f"numbers: {result.csv}")
    return 0


@dataclass(frozen=True)
class Export(CommandOptions):
    """Write a run's model for other programs: weights, class names and preprocessing, in one folder.

    The export is then loaded and compared with the run on images of its data, as tensors and from files. If they
    disagree, the exit code is 1. docs/export.md has a script that needs only onnxruntime, NumPy and Pillow.
    """

    run: Annotated[Path, RUN]
    """Folder of the run."""
    format: Literal["timm", "onnx", "pt2"] | None = None
    """timm: a directory for timm.create_model; onnx: ONNX; pt2: torch.export. It must be given."""
    output: Path | None = None
    """Folder to write; default: RUN/export-FORMAT. It may hold an earlier export, which is replaced."""
    checkpoint: Path | None = None
    """best (by --best-metric on the validation split), last, or a checkpoint such as update-00001234; default: last,
    the final model, or the newest checkpoint of a run that has not finished."""
    weights: Literal["model", "ema"] | None = None
    """Which weights; default: the EMA if the run has one."""
    trust_code: bool = False
    """Execute the code that the run keeps (RUN/code) and fetch the data that it names; read both first."""

    def mistakes(self) -> list[str]:
        return not_a_run(self.run)


def export(arguments: Sequence[str]) -> int:
    """Run `accel-train export`; return the exit code."""
    options, _ = parse_command(Export, arguments)
    if options.format is None:
        raise UserError("--format is missing; choose timm, onnx or pt2.")
    launch = prepare_environment()
    with importing(str(options.run)):
        from accel_train.tools.export.export import export

    result = export(
        launch,
        options.run,
        options.format,
        output=options.output,
        checkpoint=options.checkpoint,
        weights=options.weights,
        trust_code=options.trust_code,
    )
    print_line(f"export: {result.folder}")
    return 0


@dataclass(frozen=True)
class Track(CommandOptions):
    """Send a run's curves, settings and result to a tracker, for example if the run trained without a network.

    No step is sent twice. To send new steps, run the command again, even while the run is training.
    """

    run: Annotated[Path, RUN]
    """Folder of the run."""
    to: Literal["tensorboard", "wandb", "mlflow"] | None = None
    """The tracker."""

    def mistakes(self) -> list[str]:
        missing = ["--to: name the tracker: tensorboard, wandb or mlflow."] if self.to is None else []
        return [*not_a_run(self.run), *missing]


def track(arguments: Sequence[str]) -> int:
    """Run `accel-train track`; return the exit code."""
    options, _ = parse_command(Track, arguments)
    with importing(str(options.run)):
        from accel_train.records.trackers import track
    print_line(track(options.run, str(options.to)))
    return 0
