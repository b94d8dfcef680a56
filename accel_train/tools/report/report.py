"""`accel-train report RUN [RUN …]`: one file that opens without a network."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from accel_train.checkpoint.reading import digest_of_run
from accel_train.errors import UserError, reason_of, writing
from accel_train.files import atomic_write
from accel_train.launch.environment import Launch
from accel_train.tools.evaluate_run import EvaluationResult, Predictions, evaluate_run, read_predictions
from accel_train.tools.load_run import data_of_run
from accel_train.tools.report.curves import import_pyplot
from accel_train.tools.report.page import Picture, check_page, page_of_run, worst_images
from accel_train.tools.report.records import RunRecords, check_runs
from accel_train.tools.report.several_runs import Table, compare_runs, csv_of_runs, page_of_runs
from accel_train.untrusted import read_json_object

Evaluate = Callable[..., EvaluationResult]


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


def report(
    launch: Launch,
    paths: Sequence[Path],
    *,
    output: Path | None = None,
    evaluates: bool = True,
    checkpoint: Path | None = None,
    trust_code: bool = False,
) -> ReportResult:
    """Write the report of one run, or the comparison of several.

    `output`: default report.html in the folder of the run, or comparison.html in that of the first of several; the CSV
    file of several runs is beside it. Several runs are compared from their records: nothing is evaluated.
    `evaluates`: if there are no predictions of a run's weights, evaluate them once, and keep them; else leave out what
    needs them. `checkpoint`: whose weights are judged, see `find_weights`. `trust_code`: see `read_config`. Raises
    UserError.
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
        if checkpoint is not None:
            raise UserError("--checkpoint: several runs are compared by what they have written; leave it out.")
        return _compare(runs, output)
    evaluate: Evaluate | None = None
    if evaluates:
        evaluate = partial(evaluate_run, launch, checkpoint=checkpoint, trust_code=trust_code, keep_predictions=True)
    notes: list[str] = []
    evaluation, predictions = _evaluated(runs[0], notes, checkpoint, evaluate)
    worst: list[Picture] = []
    if predictions is not None:
        worst = _worst(runs[0], evaluation.get("split", ""), predictions, notes, trust_code=trust_code)
    with _of_records(*paths):
        page = page_of_run(runs[0], evaluation, worst, notes)
    with writing("--output", output):
        atomic_write(output, page)
    return ReportResult(output, evaluation)


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


def _evaluated(
    run: RunRecords, notes: list[str], checkpoint: Path | None, evaluate: Evaluate | None
) -> tuple[dict[str, Any], Predictions | None]:
    """The newest evaluation of the run's weights, and its predictions; {} and None if there are none, which `notes`
    says. A new one is kept. Raises UserError if the `checkpoint` that the user named has no weights."""
    try:
        digest = digest_of_run(run.path, checkpoint)
    except UserError as error:
        if checkpoint is not None:
            raise
        notes.append(f"There are no metrics of a model: {error}")
        return {}, None
    splits = ["test", "val"] if run.evaluations("test", "model") or not run.evaluations("val", "model") else ["val"]
    found = _kept(run.path, digest, splits, notes)
    if found is not None:
        return found
    if evaluate is None:
        notes.append("These weights have no predictions yet. To compute them, leave out --no-evaluate true.")
        return {}, None
    try:
        result = evaluate(run.path, split=splits[0])
    except UserError as error:
        notes.append(f"The model could not be evaluated: {error}")
        return {}, None
    result.keep(run.path, run.path / f"predictions-{splits[0]}.npz")
    return result.metrics, result.predictions


def _kept(run: Path, digest: str, splits: Sequence[str], notes: list[str]) -> tuple[dict[str, Any], Predictions] | None:
    """The evaluation of a split and its predictions, if they are of the weights with the SHA-256 `digest`."""
    for split in splits:
        file, evaluation = run / f"predictions-{split}.npz", run / f"evaluation-{split}.json"
        if not (file.is_file() and evaluation.is_file()):
            continue
        try:
            predictions, record = read_predictions(file), read_json_object(evaluation)
        except UserError as error:
            notes.append(f"The kept predictions are left out: {error}")
            continue
        # A later evaluation, of other data or of another checkpoint, may have replaced the metrics.
        if predictions.about.get("sha256") == digest and predictions.about.get("time") == record.get("time"):
            return record, predictions
    return None


def _worst(
    run: RunRecords, split: str, predictions: Predictions, notes: list[str], *, trust_code: bool
) -> list[Picture]:
    """The worst images of the evaluated `split`; `notes` says why there are none."""
    try:
        config, splits = data_of_run(run.path, trust_code=trust_code)
    except UserError as error:
        notes.append(f"The images are left out: {error}")
        return []
    source = splits.test if split == "test" else splits.validation
    if source is None or len(source) != len(predictions.ids):
        notes.append(f"The {split} images are left out: the data has changed since the evaluation.")
        return []
    return worst_images(predictions, source, run.info, config)
