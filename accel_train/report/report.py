"""`accel-train report RUN [RUN …]`: one file that opens without a network."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from accel_train.analysis.evaluate_run import evaluate_run
from accel_train.analysis.load_run import read_config
from accel_train.analysis.predictions import Predictions, read_predictions
from accel_train.checkpoint.weights import digest_of_run
from accel_train.data.sources.load import load_splits
from accel_train.errors import UserError, print_line, reason_of, writing
from accel_train.files import atomic_write, check_writable
from accel_train.launch.environment import Launch
from accel_train.report.comparison import page_of_runs
from accel_train.report.page import check_library, page_of_run
from accel_train.report.pictures import Picture, worst_pictures
from accel_train.report.plots import import_pyplot
from accel_train.report.records import RunRecords, check_runs
from accel_train.untrusted import read_json_object


def report(
    launch: Launch, paths: Sequence[Path], *, output: Path | None, evaluates: bool, trust_code: bool = False
) -> int:
    """Write the report of one run, or the comparison of several. Returns the exit code.

    `output`: default report.html in the folder of the first run. `evaluates`: if there are no predictions of the run's
    weights, evaluate them once; else leave out what needs them. `trust_code`: see `read_config`. Raises UserError.
    """
    launch.check_alone("report")
    import_pyplot()  # their absence is told before the work
    check_library()
    runs = check_runs(paths)
    output = output or paths[0] / "report.html"
    with writing("--output", output):
        check_writable(output)
    if len(runs) > 1:
        with _of_records(*paths):
            page = page_of_runs(runs, [])
    else:
        notes: list[str] = []
        evaluation, pictures = _evaluated(launch, runs[0], notes, evaluates=evaluates, trust_code=trust_code)
        with _of_records(paths[0]):
            page = page_of_run(runs[0], evaluation, pictures, notes)
    with writing("--output", output):
        atomic_write(output, page)
    print_line(f"report: {output}")
    return 0


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
    launch: Launch, run: RunRecords, notes: list[str], *, evaluates: bool, trust_code: bool
) -> tuple[dict[str, Any], list[Picture]]:
    """The newest evaluation of the run's weights, and the worst images; {} and [] if there are none, which `notes`
    says."""
    try:
        digest = digest_of_run(run.path)
    except UserError as error:
        notes.append(f"There are no figures of a model: {error}")
        return {}, []
    splits = ["test", "val"] if run.evaluations("test", "model") or not run.evaluations("val", "model") else ["val"]
    found = _kept(run.path, digest, splits, notes)
    if found is None and evaluates:
        try:
            path = run.path / f"predictions-{splits[0]}.npz"
            measured = evaluate_run(
                launch, run.path, split=splits[0], checkpoint=None, overrides=(), trust_code=trust_code,
                predictions=path,
            )  # fmt: skip
        except UserError as error:
            notes.append(f"The model could not be evaluated: {error}")
            return {}, []
        # Not read from the files, which may be impossible to write.
        found = None if measured.predictions is None else (measured.record, measured.predictions)
    if found is None:
        notes.append("These weights have no predictions yet. To compute them, leave out --no-evaluate true.")
        return {}, []
    record, predictions = found
    return record, _pictures(run, record["split"], predictions, notes, trust_code=trust_code)


def _kept(run: Path, digest: str, splits: Sequence[str], notes: list[str]) -> tuple[dict[str, Any], Predictions] | None:
    """The evaluation of a split and its predictions, if they are of the weights with the SHA-256 `digest`."""
    for split in splits:
        file, figures = run / f"predictions-{split}.npz", run / f"evaluation-{split}.json"
        if not (file.is_file() and figures.is_file()):
            continue
        try:
            predictions, record = read_predictions(file), read_json_object(figures)
        except UserError as error:
            notes.append(f"The kept predictions are left out: {error}")
            continue
        # A later evaluation, of other data or of another checkpoint, may have replaced the figures.
        if predictions.about.get("sha256") == digest and predictions.about.get("time") == record.get("time"):
            return record, predictions
    return None


def _pictures(
    run: RunRecords, split: str, predictions: Predictions, notes: list[str], *, trust_code: bool
) -> list[Picture]:
    try:
        config = read_config(run.path, uses=("data.name",), trust_code=trust_code)
        splits = load_splits(config.data, config.seed, download=False, record=run.path)
        source = splits.test if split == "test" else splits.validation
        if source is None or len(source) != len(predictions.ids):
            raise UserError("the data has changed since the evaluation.")
        return worst_pictures(predictions, source, run.info, config)
    except UserError as error:
        notes.append(f"The worst images are left out: {error}")
        return []
