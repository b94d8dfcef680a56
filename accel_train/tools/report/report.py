"""`accel-train report RUN [RUN …]`: one file that opens without a network."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from accel_train.config.schema import Config
from accel_train.data.sources.splits import Source
from accel_train.errors import UserError, reason_of, writing
from accel_train.files import atomic_write
from accel_train.launch.environment import Launch
from accel_train.tools.load_run import data_of_run
from accel_train.tools.report.curves import import_pyplot
from accel_train.tools.report.page import check_page, page_of_run, worst_images
from accel_train.tools.report.records import RunRecords, check_runs
from accel_train.tools.report.several_runs import Table, compare_runs, csv_of_runs, page_of_runs
from accel_train.untrusted import read_json_object


@dataclass(frozen=True)
class ReportResult:
    """A page that was written."""

    path: Path
    metrics: Mapping[str, Any] = field(repr=False)
    """Of the evaluation that it shows, as RUN/evaluation-SPLIT.json has them; {} if there is none, or several runs."""
    tables: tuple[Table, ...] = field(default=(), repr=False)
    """Of several runs: what `compare_runs` returns."""
    csv: Path | None = None
    """Of several runs: a file with a row for each run."""
    notes: tuple[str, ...] = ()
    """What is missing, and how to get it."""


def report(
    launch: Launch,
    paths: Sequence[Path],
    *,
    output: Path | None = None,
    trust_code: bool = False,
) -> ReportResult:
    """Write the report of one run, or the comparison of several.

    `output`: default report.html in the folder of the run, or comparison.html in that of the first of several; the CSV
    file of several runs is beside it. All is read from the records of the runs, and of `accel-train evaluate`; only the
    images come from the data. `trust_code`: see `read_config`. Raises UserError.
    """
    launch.check_alone("report")
    if not paths:
        raise UserError("report: expected the folder of a run, or of several; found none.")
    paths = list({path.resolve(): path for path in reversed(paths)}.values())[::-1]  # a run twice would be two seeds
    import_pyplot()  # its absence is told before the work
    runs = check_runs(paths)
    output = output or paths[0] / ("report.html" if len(runs) == 1 else "comparison.html")
    check_page("--output", output)
    if len(runs) > 1:
        return _compare(runs, output)
    notes: list[str] = []
    with _of_records(*paths):
        evaluation = _evaluation_of(runs[0], notes)
    images = _images_of(runs[0], evaluation, notes, trust_code=trust_code)
    with _of_records(*paths):
        worst = [] if images is None else worst_images(evaluation, runs[0].info, *images)
        page = page_of_run(runs[0], evaluation, worst, notes)
    with writing("--output", output):
        atomic_write(output, page)
    return ReportResult(output, evaluation, notes=tuple(notes))


def _compare(runs: Sequence[RunRecords], output: Path) -> ReportResult:
    """Write the page and the CSV file of several runs."""
    with _of_records(*(run.path for run in runs)):
        page, tables, rows = page_of_runs(runs), compare_runs(runs), csv_of_runs(runs)
    with writing("--output", output):
        atomic_write(output, page)
        atomic_write(output.with_suffix(".csv"), rows)
    return ReportResult(output, {}, tuple(tables), output.with_suffix(".csv"))


@contextlib.contextmanager
def _of_records(*runs: Path) -> Iterator[None]:
    """Turn an error that only damaged records of the runs can cause into a UserError: any value of a file may be of
    another type than this program writes."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        names = ", ".join(map(str, runs))
        raise UserError(
            f"a record of {names} is damaged ({reason_of(error, 100)}): look at evaluation-SPLIT.json, metrics.jsonl, "
            "result.json and environment.json; copy them again, or remove the damaged one."
        ) from error


def _evaluation_of(run: RunRecords, notes: list[str]) -> dict[str, Any]:
    """What `accel-train evaluate` has measured on the test split, or else on the validation split; {} if nothing.
    `notes` says what to type if it is missing, or older than the weights."""
    splits = ["test", "val"] if run.evaluations("test", "model") or not run.evaluations("val", "model") else ["val"]
    line = f"accel-train evaluate {shlex.quote(str(run.path))}" + (" --split val" if splits == ["val"] else "")
    records = (read_json_object(run.path / f"evaluation-{split}.json") for split in splits)
    evaluation = next((record for record in records if record), {})
    if not evaluation:
        notes.append(f"The model has not been evaluated. More metrics, the classes and the worst images need: {line}")
    elif datetime.fromisoformat(evaluation["time"]).timestamp() < run.status.get("time", 0) - 1:  # whole seconds
        notes.append(f"The run has trained since it was evaluated. To evaluate it again: {line}")
    return evaluation


def _images_of(
    run: RunRecords, evaluation: dict[str, Any], notes: list[str], *, trust_code: bool
) -> tuple[Config, Source] | None:
    """The evaluated split, and the run's configuration; None without one, and `notes` says why."""
    if not evaluation:
        return None
    try:
        config, splits = data_of_run(run.path, trust_code=trust_code)
    except UserError as error:
        notes.append(f"The images are left out: {error}")
        return None
    source = splits.test if evaluation.get("split") == "test" else splits.validation
    return None if source is None else (config, source)
