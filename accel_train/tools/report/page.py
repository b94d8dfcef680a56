"""The page of one run: the images that the model is most wrong about, and its records in tables."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from accel_train import __version__
from accel_train.config.schema import Config
from accel_train.data.sources.files.images import to_image
from accel_train.data.sources.splits import Source
from accel_train.errors import UserError, needing, one_line
from accel_train.files import check_writable
from accel_train.records.cost import cost_of, cost_text, read_starts
from accel_train.records.model_info import ModelInfo
from accel_train.task import metric_title
from accel_train.tools.evaluate_run import (
    CLASS_METRICS,
    NO_VALUE,
    WORST,
    accuracy_interval,
    images_of_classes,
    interval_of,
    interval_text,
    metric_rows,
    without_images,
)
from accel_train.tools.load_run import Preprocessing
from accel_train.tools.report.curves import charts_of_run, draw
from accel_train.tools.report.records import SPLITS, Row, RunRecords, differences_from_recipe, state_of

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


def worst_images(evaluation: Row, info: ModelInfo, config: Config, source: Source) -> list[Picture]:
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


HEAT_MAP = 50  # classes at most; of more, the most confused pairs are listed
PAIRS = 50


def page_of_run(run: RunRecords, evaluation: Row, worst: Sequence[Picture], notes: Sequence[str]) -> str:
    """The page of one run. `evaluation`: what evaluation-SPLIT.json holds, or {}; `worst`: images."""
    records = [evaluation[name] for name in ("model", "ema") if name in evaluation]
    record: Row = records[-1] if records else {}  # the EMA's if there is one
    base, differences = differences_from_recipe(run)
    return render(
        "report/run.html",
        title=f"{run.config.recipe or run.name}: {run.name}",
        state=state_of(run),
        headline=headline(run, evaluation),
        facts=facts_of(run),
        charts=[draw(chart) for chart in charts_of_run(run) if not chart.is_empty],
        metrics=metric_table(run, records),
        records=records,
        record=record,
        split=evaluation.get("split", ""),
        confusion=confusion_table(record, run.info.classes),
        pairs=confused_pairs(record, run.info.classes),
        classes=class_table(run, record, evaluation.get("split", "")),
        worst=worst,
        base=base,
        differences=differences,
        settings=run.settings,
        machine=machine_and_time(run),
        notes=notes,
    )


def metric_table(run: RunRecords, records: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Each metric with its value for each of the weights."""
    rows = metric_rows(records, run.info.classes, run.metrics)
    return [(metric_title(key) if title == key else title, values) for key, title, values in rows]


def confusion_table(record: Row, classes: Sequence[str]) -> list[Row]:
    """The rows of the heat map: of each true class, the count and the share of each predicted class."""
    confusion = record.get("confusion")
    if not confusion or len(classes) > HEAT_MAP:
        return []
    return [
        {"name": name, "cells": [(count, count / max(1, sum(counts))) for count in counts]}
        for name, counts in zip(classes, confusion, strict=True)
    ]


def confused_pairs(record: Row, classes: Sequence[str]) -> list[tuple[str, str, int]]:
    """(true class, predicted class, images) of the pairs that are confused most often, if there is no heat map."""
    confusion = record.get("confusion")
    if not confusion or len(classes) <= HEAT_MAP:
        return []
    wrong = [
        (count, true, said)
        for true, counts in enumerate(confusion)
        for said, count in enumerate(counts)
        if count and true != said
    ]
    worst = sorted(wrong, key=lambda entry: (-entry[0], entry[1:]))[:PAIRS]
    return [(classes[true], classes[said], count) for count, true, said in worst]


def class_table(run: RunRecords, record: Row, split: str) -> Row:
    """The table of the classes, or {} if nothing is known of them.

    "head": the titles; "rows": of each class its name and then cells (number, text, share), where the share of the
    largest number of images is shown as a bar, or None; "empty": which classes have no image in the `split`.
    """
    classes = run.info.classes
    evaluated = images_of_classes(record)
    known = record if evaluated else {}
    images: dict[str, Any] = {
        name: run.data[name]["class_images"] for name in ("train", "val", "test") if name in run.data
    }
    if known:
        images = {name: counts for name, counts in images.items() if name != split} | {split: evaluated}
    if not images:
        return {}
    columns = {title: known[key] for title, key in CLASS_METRICS.items() if key in known}
    intervals = _intervals(known)
    head = ["class", *(f"{name} images" for name in images)]
    for title in columns:
        head += [title, "95% interval"] if title == "recall" and intervals else [title]
    rows: list[list[Any]] = []
    for label, name in enumerate(classes):
        row: list[Any] = [
            name,
            *((counts[label], f"{counts[label]:,}", counts[label] / max(1, *counts)) for counts in images.values()),
        ]
        for title, values in columns.items():
            row.append(_cell(values[label] if images[split][label] else None, NO_VALUE * (not images[split][label])))
            if title == "recall" and intervals:
                interval = intervals[label]
                row.append((-1.0 if interval is None else interval[0], interval_text(interval), None))
        rows.append(row)
    return {"head": head, "rows": rows, "empty": without_images(known, classes, split) if known else ""}


def _intervals(record: Row) -> list[tuple[float, float] | None]:
    """The interval of the recall of each class, from the counts."""
    confusion = record.get("confusion") or []
    return [accuracy_interval(row[label], sum(row)) if sum(row) else None for label, row in enumerate(confusion)]


def _cell(value: float | None, otherwise: str) -> tuple[float, str, None]:
    return (-1.0, otherwise, None) if value is None else (value, f"{value:.1%}", None)


def facts_of(run: RunRecords) -> list[tuple[str, str]]:
    settings = run.settings
    trained = run.result.get("train_images")
    facts = [
        ("model", str(settings["model.name"])),
        ("data", f"{settings['data.name']}, {len(run.info.classes)} classes"),
        ("input", f"{run.info.image_size} x {run.info.image_size} pixels, {run.info.channels} channels"),
        (
            "optimizer",
            f"{settings['optim.name']}, learning rate {settings['optim.lr']:g}, batch {settings['batch-size']}",
        ),
        ("epochs", str(settings["epochs"])),
        ("seed", str(settings["seed"])),
    ]
    return facts + ([("training images", f"{trained:,}")] if trained else [])


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


def check_page(option: str, path: Path) -> None:
    """Raise UserError if the page `path` that the `option` names cannot be written, or Jinja2 is not installed."""
    with needing("Jinja2 is not installed, so there is no report: pip install 'accel-train[report]'."):
        import jinja2  # noqa: F401
    check_writable(option, path)


def render(template: str, **content: Any) -> str:
    """The page of a template, which is named from accel_train/tools: "report/run.html"."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("accel_train", "tools"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,  # not the page's own markup
    )
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    page: str = environment.get_template(template).render(version=__version__, now=now, **content)
    return page
