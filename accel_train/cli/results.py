"""What runs have come to: `accel-train report`, `export`, `track` and `runs`."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from accel_train.cli.common import WeightsOptions, importing, print_table
from accel_train.config.declaration import RUN_WORD, Word
from accel_train.config.options import CommandOptions, parse_command
from accel_train.config.recipe import not_a_run
from accel_train.errors import UserError, print_line
from accel_train.files import is_number, read_json_object
from accel_train.launch.environment import prepare_environment
from accel_train.ownership.owner import FILE, age_text, read_owner, read_result
from accel_train.tools.cluster.scheduler import LOOK_SECONDS, answers, states_of
from accel_train.tools.cluster.submission import LISTS, RECIPE, is_job, job_of_run, jobs_of_folder, newest


@dataclass(frozen=True, kw_only=True)
class Report(CommandOptions):
    """Write a page about a run: curves, metrics, confusion, the worst images. Of several runs: compare them.

    The page is one file that needs no network, and shows what the run and accel-train evaluate have written; images are
    read from the data. Several runs are compared: metrics, means over seeds, Welch's test, speed; a CSV file beside the
    page has the numbers.
    """

    runs: Annotated[tuple[Path, ...], Word("RUN …")]
    """Folders of the runs, or folders with runs in them, such as one of accel-train submit."""
    output: Path | None = None
    """The file to write; default: report.html in the run, or in the folder of runs; of several RUNs comparison.html in
    the first one."""
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


def report(arguments: Sequence[str]) -> int:
    """Run `accel-train report`; return the exit code."""
    options, _ = parse_command(Report, arguments)

    launch = prepare_environment()
    with importing(str(options.runs[0])):
        from accel_train.tools.report.report import report

    first = options.runs[0]
    in_folder = None if (first / "config.yaml").exists() else first / "report.html"
    output = options.output or in_folder
    result = report(launch, options.all_runs(), output=output, trust_code=options.trust_code)
    for table in result.tables:
        print_line(f"{table.title}:")
        print_table(table.head, table.rows)
        print_line("")
    for note in result.notes:
        print_line(note)
    print_line(f"report: {result.path}")
    if result.csv is not None:
        print_line(f"numbers: {result.csv}")
    return 0


@dataclass(frozen=True, kw_only=True)
class Export(WeightsOptions):
    """Write a run's model for other programs: weights, class names and preprocessing, in one folder.

    The export is then loaded and compared with the run, on equal inputs. If they disagree, the exit code is 1.
    docs/export.md has a script that needs only onnxruntime, NumPy and Pillow.
    """

    run: Annotated[Path, RUN_WORD]
    """Folder of the run."""
    format: Literal["timm", "onnx", "pt2"] | None = None
    """timm: a directory for timm.create_model; onnx: ONNX; pt2: torch.export. It must be given."""
    output: Path | None = None
    """Folder to write; default: RUN/export-FORMAT."""
    weights: Literal["model", "ema"] | None = None
    """Which weights; default: the EMA if the run has one."""

    def mistakes(self) -> list[str]:
        return not_a_run(self.run)


def export(arguments: Sequence[str]) -> int:
    """Run `accel-train export`; return the exit code."""
    options, _ = parse_command(Export, arguments)
    if options.format is None:
        raise UserError("--format is missing; choose timm, onnx or pt2.")
    launch = prepare_environment()
    with importing(str(options.run)):
        from accel_train.tools.export import export

    folder = export(
        launch,
        options.run,
        options.format,
        output=options.output,
        checkpoint=options.checkpoint,
        weights=options.weights,
        trust_code=options.trust_code,
    )
    print_line(f"export: {folder}")
    return 0


@dataclass(frozen=True)
class Track(CommandOptions):
    """Send a run's curves, settings and result to a tracker, for example if the run trained without a network.

    No step is sent twice. To send new steps, run the command again, even while the run is training.
    """

    run: Annotated[Path, RUN_WORD]
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


@dataclass(frozen=True)
class Runs(CommandOptions):
    """List the runs in a folder and its subfolders, the most recently updated first. Changes nothing.

    A run is "running", "finished", "interrupted" (saved; the same command continues it), "failed", or "stale": its
    process died, or has given no sign of life for two minutes. The next start takes over a stale run. "job" is the
    state of a run's job in Slurm or PBS; "forgotten": it has ended, some time ago. Runs of `accel-train submit` are
    listed before they have begun.
    """

    dir: Annotated[Path, Word("[DIR]")] = Path("runs")
    """The folder to look in."""

    def mistakes(self) -> list[str]:
        if self.dir.is_dir() or self.dir == Path("runs"):  # the default exists from the first run on
            return []
        return [f"{self.dir}: no such folder; give the one in which the runs are."]


def runs(arguments: Sequence[str]) -> int:
    """Run `accel-train runs`; return the exit code."""
    options, _ = parse_command(Runs, arguments)
    found = sorted(_read_runs(options.dir), key=lambda run: run.changed, reverse=True)
    if not found:
        print_line(f"There are no runs in {options.dir.absolute()}.")
        return 0
    head = ["run", "state", "epoch", "accuracy", "age", "owner"]
    rows = [[str(run.path), run.state, run.epoch, run.accuracy, _age(run.changed), run.owner] for run in found]
    if states := _job_states(found):
        head.insert(2, "job")
        for row, state in zip(rows, states, strict=True):
            row.insert(2, state)
    print_table(head, rows, numbers=("epoch", "accuracy", "age"))
    return 0


@dataclass(frozen=True)
class Run:
    """A line of the list."""

    path: Path
    state: str
    epoch: str
    accuracy: str
    changed: float
    """When its status was written last, in seconds since 1970."""
    owner: str
    job: str = ""
    """That of the owner, as its batch system names it."""


def _job_states(found: Sequence[Run]) -> list[str]:
    """Return the state of each run's job, with its number; [] without a scheduler, or if no run has a job."""
    try:
        submitted = {folder: jobs_of_folder(folder) for folder in {run.path.parent for run in found}}
        jobs = [
            [*submitted[run.path.parent].get(run.path.name, ()), *job_of_run(run.path), *filter(is_job, [run.job])]
            for run in found
        ]
        states = states_of((job for numbers in jobs for job in numbers), LOOK_SECONDS)
    except (UserError, OSError) as error:
        print_line(f"accel-train runs: without the states of jobs: {error}", sys.stderr)
        return []
    known = [newest(numbers, states) for numbers in jobs]
    for place, (run, numbers) in enumerate(zip(found, jobs, strict=True)):
        if numbers and not known[place][1] and run.state != "finished" and answers(numbers[-1]):
            known[place] = (numbers[-1], "forgotten")
    return [f"{state} {job}".strip() for job, state in known] if any(state for _, state in known) else []


def _read_runs(top: Path) -> Iterator[Run]:
    for folder in run_folders(top):
        with contextlib.suppress(FileNotFoundError):  # somebody deletes it
            yield _read_run(folder)


def run_folders(top: Path) -> Iterator[Path]:
    """Return the folders of runs, which have a config.yaml and a status.json or an owner; or a recipe, beside lists of
    submitted runs. No run is inside of a run."""
    for folder, folders, files in os.walk(top):
        submitted = RECIPE in files and any(Path(folder).with_name(LISTS).glob("*.jsonl"))
        if submitted or ("config.yaml" in files and ("status.json" in files or FILE in files)):
            folders.clear()
            yield Path(folder)
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def _read_run(path: Path) -> Run:
    status, result = read_json_object(path / "status.json"), read_result(path)
    changed, has_begun = status.get("time", math.nan), (path / "config.yaml").exists()
    if not is_number(changed):
        changed = (path / ("config.yaml" if has_begun else RECIPE)).stat().st_mtime
    lives, owner, job = _owner(path)
    state = status.get("state")
    if lives:
        state = "running"
    elif not has_begun:
        state = "not begun"
    elif state not in ("finished", "interrupted", "failed"):  # it ended without a word
        state = "finished" if result else "stale"  # or right after it had written its result
    return Run(path, str(state), _epoch(status) if has_begun else "", _accuracy(status, result), changed, owner, job)


def _owner(run: Path) -> tuple[bool, str, str]:
    """Return (whether the owner is alive, who it is, its job); (False, "", "") without an owner."""
    try:
        seen = read_owner(run / FILE)
    except OSError:
        return False, "", ""
    if seen.owner is None:
        return seen.seems_alive(), "unknown", ""
    job = f", job {seen.owner.job}" if seen.owner.job else ""
    return seen.seems_alive(), f"{seen.owner.host} {seen.owner.pid}{job}", seen.owner.job


def _epoch(status: Mapping[str, Any]) -> str:
    epoch, epochs = (status.get(name, "?") for name in ("epoch", "epochs"))
    return f"{epoch}/{math.ceil(epochs) if is_number(epochs) else '?'}"


def _accuracy(status: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return the accuracy on the test split; else the best one on the validation split, of a run that trains the newest
    one; else "". If images have several labels, the mean average precision stands for it."""
    for name, shown in (("accuracy", ""), ("map", "map ")):
        best = result.get(f"best_val_{name}")
        values = {"test": result.get(f"test_{name}"), "val": status.get(f"val_{name}") if best is None else best}
        for split, value in values.items():
            if is_number(value):
                return f"{split} {shown}{value:.2%}"
    return ""


def _age(changed: float) -> str:
    seconds = max(0.0, time.time() - changed)
    return age_text(seconds) if seconds < 172800 else f"{seconds / 86400:.0f} days"
