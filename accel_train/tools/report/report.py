"""`accel-train report RUN [RUN …]`: one file that opens without a network.

First the command, then the page of one run: its records in tables, and the images that the model is most wrong about.
"""

from __future__ import annotations

import base64
import contextlib
import io
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from accel_train.config.schema import Config
from accel_train.data.sources.images import to_image
from accel_train.data.sources.splits import Source
from accel_train.errors import UserError, reason_of, writing
from accel_train.files import atomic_write, read_json_object
from accel_train.launch.environment import Launch
from accel_train.records.cost import cost_of, cost_text, read_starts
from accel_train.records.model_info import ModelInfo
from accel_train.records.summary import typed_program
from accel_train.task import metric_title
from accel_train.tools.evaluate_run import (
    WORST,
    Table,
    class_table,
    images_of_classes,
    interval_of,
    interval_text,
    metric_table,
    without_images,
)
from accel_train.tools.load_run import Preprocessing, data_of_run
from accel_train.tools.report.curves import charts_of_run, check_page, draw, import_pyplot, render
from accel_train.tools.report.records import SPLITS, Row, RunRecords, check_runs, differences_from_recipe, state_of
from accel_train.tools.report.several_runs import compare_runs, csv_of_runs, page_of_runs


@dataclass(frozen=True)
class ReportResult:
    """A page that was written."""

    path: Path
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
        worst = [] if images is None else pictures_of_worst(evaluation, runs[0].info, *images)
        page = page_of_run(runs[0], evaluation, worst, notes)
    with writing("--output", output):
        atomic_write(output, page)
    return ReportResult(output, notes=tuple(notes))


def _compare(runs: Sequence[RunRecords], output: Path) -> ReportResult:
    """Write the page and the CSV file of several runs."""
    with _of_records(*(run.path for run in runs)):
        page, tables, rows = page_of_runs(runs), compare_runs(runs), csv_of_runs(runs)
    with writing("--output", output):
        atomic_write(output, page)
        atomic_write(output.with_suffix(".csv"), rows)
    return ReportResult(output, tuple(tables), output.with_suffix(".csv"))


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
    `notes` says what to type if it is missing, older than the weights, or of a checkpoint of a run that has ended."""
    splits = ["test", "val"] if run.evaluations("test", "model") or not run.evaluations("val", "model") else ["val"]
    line = f"{typed_program()} evaluate {shlex.quote(str(run.path))}" + (" --split val" if splits == ["val"] else "")
    records = (read_json_object(run.path / f"evaluation-{split}.json") for split in splits)
    evaluation = next((record for record in records if record), {})
    if not evaluation:
        notes.append(f"The model has not been evaluated. More metrics, the classes and the worst images need: {line}")
    elif datetime.fromisoformat(evaluation["time"]).timestamp() < run.status.get("time", 0) - 1:  # whole seconds
        notes.append(f"The run has trained since it was evaluated. To evaluate it again: {line}")
    evaluated = [Path(evaluation[name]["weights"]) for name in ("model", "ema") if name in evaluation]
    if run.result and (others := [file for file in evaluated if file.parent != Path()]):  # the final ones are in RUN
        notes.append(f"The evaluation is of {others[0]}, not of the final weights. To evaluate these: {line}")
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


SMALL = 64
"""Pixels: smaller images are kept without loss, as PNG, and base.html shows the pixels of each PNG."""


@dataclass(frozen=True)
class Picture:
    """An image with its predicted and its true classes."""

    name: str
    uri: str
    """The image as a data: URI."""
    said: str
    true: str


def pictures_of_worst(evaluation: Row, info: ModelInfo, config: Config, source: Source) -> list[Picture]:
    """The worst images that an evaluation names. `source`: the split of which they are. Images that cannot be read, or
    that have another name there, are left out."""
    preprocessing, pictures = Preprocessing(info, config.augment), list[Picture]()
    for worst in (evaluation.get("ema") or evaluation.get("model") or {}).get("worst", ())[:WORST]:
        if 0 <= worst["id"] < len(source) and source.name(worst["id"]) == worst["name"]:
            with contextlib.suppress(UserError):
                uri = data_uri(input_image(source, worst["id"], preprocessing, info))
                pictures.append(Picture(worst["name"], uri, str(worst["said"]), str(worst["true"])))
    return pictures


def input_image(source: Source, id: int, preprocessing: Preprocessing, info: ModelInfo) -> Image.Image:
    """The image `id` of a source as the model of `info` saw it. Raises UserError if it cannot be read."""
    pixels = torch.as_tensor(source.fetch([id])[0])
    return image_of_input(preprocessing.to_input(preprocessing.resize(pixels))[0], info)


def image_of_input(inputs: torch.Tensor, info: ModelInfo) -> Image.Image:
    """The normalised input, float32 [C, size, size], as an image again."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (info.mean, info.std))
    pixels = inputs * std + mean
    if info.full_scale == 1:  # a user's own float images may have any range
        pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp(min=1e-12)
    pixels = pixels if len(pixels) in (1, 3) else pixels[:1]
    return to_image((pixels.clamp(0, 1) * 255).round().to(torch.uint8))


def data_uri(image: Image.Image) -> str:
    """The image as a data: URI of a PNG if it is small, else of a JPEG."""
    file, kind = io.BytesIO(), "png" if max(image.size) <= SMALL else "jpeg"
    image.save(file, format=kind, quality=85)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def headline(run: RunRecords, evaluation: Row) -> str:
    """The run's main metric with its 95 % interval, and on which split; "" if it has not been evaluated.

    Of the evaluation, else of the newest one during training; the EMA's if there is one.
    """
    found = [
        (weights, evaluation["split"], evaluation[weights]) for weights in ("ema", "model") if weights in evaluation
    ]
    found += [(weights, *run.newest_evaluation(weights)) for weights in ("ema", "model")]
    measured = [entry for entry in found if entry[2]]
    if not measured:
        return ""
    weights, split, record = measured[0]
    metric = run.info.task.best_metric
    value, interval = record.get(metric), interval_of(record)
    title, whose = metric_title(metric).capitalize(), "EMA" if weights == "ema" else "model"
    when = f", after epoch {record['epoch']}" if "epoch" in record else ""
    shown = "NaN" if value is None else f"{value:.1%}"
    shown += f" (95% interval: {interval_text(interval)})" if interval else ""
    return f"{title} of the {whose} on {record['count']:,} {SPLITS[split]} images{when}: {shown}"


HEAT_MAP = 50  # classes at most; of more, the table of the classes says for what each is most often mistaken


def page_of_run(run: RunRecords, evaluation: Row, worst: Sequence[Picture], notes: Sequence[str]) -> str:
    """The page of one run. `evaluation`: what evaluation-SPLIT.json holds, or {}; `worst`: images."""
    records = [evaluation[name] for name in ("model", "ema") if name in evaluation]
    record: Row = records[-1] if records else {}  # the EMA's if there is one
    split, classes = evaluation.get("split", ""), run.info.classes
    images = {name: run.data[name]["class_images"] for name in SPLITS if name in run.data}
    if evaluated := images_of_classes(record):
        images[split] = evaluated
    base, differences = differences_from_recipe(run)
    return render(
        "report/run.html",
        title=f"{run.config.recipe or run.name}: {run.name}",
        state=state_of(run),
        headline=headline(run, evaluation),
        charts=[draw(chart) for chart in charts_of_run(run) if not chart.is_empty],
        metrics=metric_table(records, classes, run.metrics),
        record=record,
        split=split,
        confusion=confusion_table(record, classes),
        classes=class_table(record, classes, {f"{name} images": counts for name, counts in images.items()}),
        empty=without_images(record, classes, split) if evaluated else "",
        worst=worst,
        base=base,
        differences=differences,
        settings=run.settings,
        machine=machine_and_time(run),
        notes=notes,
    )


def confusion_table(record: Row, classes: Sequence[str]) -> list[Row]:
    """The rows of the heat map: of each true class, the count and the share of each predicted class."""
    confusion = record.get("confusion")
    if not confusion or len(classes) > HEAT_MAP:
        return []
    return [
        {"name": name, "cells": [(count, count / max(1, sum(counts))) for count in counts]}
        for name, counts in zip(classes, confusion, strict=True)
    ]


def machine_and_time(run: RunRecords) -> list[tuple[str, str]]:
    """Where the run trained, what it cost, its speed, and the updates that were skipped."""
    cost = cost_of(read_starts(run.path))
    hours, speed = cost.get("accelerator_hours"), run.result.get("images_per_second")
    skipped = run.result.get("skipped_updates")
    rows = [
        ("processes", str(run.environment.get("world_size", ""))),
        ("devices", run.devices),
        ("time", cost_text(cost) if cost else ""),
        ("accelerator-hours", f"{hours:.3g}" if hours else ""),
        ("speed of training", f"{speed:,.0f} images/s" if speed else ""),
        ("skipped updates", f"{skipped:,}" if skipped else ""),
    ]
    return [(name, value) for name, value in rows if value]
