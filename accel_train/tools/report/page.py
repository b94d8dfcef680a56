"""The page of one run: the images that the model is most wrong about, its records in sentences and tables.

The sentences say only what the run's records say.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import expit, log_expit, log_softmax, softmax

from accel_train import __version__
from accel_train.config.schema import Config
from accel_train.data.sources.files.images import to_image
from accel_train.data.sources.splits import Source
from accel_train.errors import UserError, first_of, needing, one_line
from accel_train.files import check_writable
from accel_train.records.cost import cost_of, cost_text, read_starts
from accel_train.records.metrics import metric_title
from accel_train.records.model_info import ModelInfo
from accel_train.tools.evaluate_run import (
    CLASS_METRICS,
    NO_VALUE,
    Predictions,
    accuracy_interval,
    images_of_classes,
    interval_of,
    interval_text,
    metric_rows,
    without_images,
)
from accel_train.tools.load_run import Preprocessing
from accel_train.tools.report.curves import best_of, charts_of_run, draw
from accel_train.tools.report.records import SPLITS, Row, RunRecords, differences_from_recipe, state_of

WORST = 20
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
    loss: float


def worst_images(predictions: Predictions, source: Source, info: ModelInfo, config: Config) -> list[Picture]:
    """The WORST images with the highest loss that are classified wrongly; those that cannot be read are left out.

    `source`: the split that the predictions are of.
    """
    logits, labels = predictions.logits.astype(np.float64), predictions.labels
    if labels.ndim == 2:  # the mean binary cross-entropy
        losses = -np.where(labels, log_expit(logits), log_expit(-logits)).mean(1)
        is_right = ((logits >= 0) == labels).all(1)
    else:
        losses = -log_softmax(logits, axis=1)[np.arange(len(logits)), labels]
        is_right = logits.argmax(1) == labels
    preprocessing = Preprocessing(info, config.augment)

    def pictures(ids: npt.NDArray[np.int64]) -> Iterator[Picture]:
        for id in ids.tolist():
            with contextlib.suppress(UserError):
                uri = input_uri(source, id, preprocessing, info)
                yield Picture(source.name(id), uri, *_said_and_true(predictions, id), float(losses[id]))

    wrong = np.flatnonzero(~is_right)
    return [*itertools.islice(pictures(wrong[np.argsort(-losses[wrong], kind="stable")]), WORST)]


def _said_and_true(predictions: Predictions, id: int) -> tuple[str, str]:
    logits, label, names = predictions.logits[id].astype(np.float64), predictions.labels[id], predictions.classes
    if predictions.labels.ndim == 2:
        chances = expit(logits)
        said = [f"{names[number]} ({chances[number]:.0%})" for number in np.flatnonzero(logits >= 0)]
        true = [f"{names[number]} ({chances[number]:.0%})" for number in np.flatnonzero(label)]
        return ", ".join(said) or "none", ", ".join(true) or "none"
    chances = softmax(logits)
    first = int(predictions.logits[id].argmax())
    return f"{names[first]} ({chances[first]:.0%})", f"{names[label]} ({chances[label]:.1%})"


def input_uri(source: Source, id: int, preprocessing: Preprocessing, info: ModelInfo) -> str:
    """The image `id` of a source as the model of `info` saw it. Raises UserError if it cannot be read."""
    pixels = torch.as_tensor(source.fetch([id])[0])
    return image_uri(preprocessing.to_input(preprocessing.resize(pixels))[0], info)


def image_uri(inputs: torch.Tensor, info: ModelInfo) -> str:
    """The normalised input, float32 [C, size, size], as an image again."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (info.mean, info.std))
    pixels = inputs * std + mean
    if info.full_scale == 1:  # a user's own float images may have any range
        pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp(min=1e-12)
    pixels = pixels if len(pixels) in (1, 3) else pixels[:1]
    return data_uri((pixels.clamp(0, 1) * 255).round().to(torch.uint8))


def data_uri(pixels: torch.Tensor) -> str:
    """Pixels, uint8 [C, H, W] of 1 or 3 channels, as a data: URI of a PNG if they are few, else of a JPEG."""
    file, kind = io.BytesIO(), "png" if max(pixels.shape[1:]) <= SMALL else "jpeg"
    to_image(pixels).save(file, format=kind, quality=85)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


IMBALANCE = 10  # the largest class has so many times the training images of the smallest


@dataclass(frozen=True)
class Sentence:
    text: str
    kind: str = "plain"
    """"lead": what the page is for; "doubt": the same, but bad news; "plain"; or "warning": somebody should look."""


def words_of(run: RunRecords, evaluation: Row) -> list[Sentence]:
    """The sentences on top of the page, in their order. `evaluation`: what evaluation-SPLIT.json holds, or {}."""
    split, record, subject = shown_record(run, evaluation)
    return [*_figures(run, split, record, subject), *_ending(run), *_course(run), *_data(run, split, record)]


def shown_record(run: RunRecords, evaluation: Row) -> tuple[str, Row, str]:
    """The split, the figures that the words are about, and whose they are.

    Of the evaluation, else of result.json, else the last evaluation during training; the EMA's if there are any. ""
    and {} if there are none.
    """
    for weights, subject in (("ema", "The EMA"), ("model", "The model")):
        if weights in evaluation:
            return evaluation["split"], evaluation[weights], subject
    metric = run.main_metric
    if run.result.get("test_images") and f"test_{metric}" in run.result:
        record: Row = {metric: run.result[f"test_{metric}"], "count": run.result["test_images"]}
        record |= {name: run.result[name] for name in ("confusion", "class_images") if name in run.result}
        return "test", record, "The model"
    split, rows = run.held_out
    if not rows:
        return "", {}, ""
    subject = "The EMA" if rows[-1].get("weights") == "ema" else "The model"
    return split, rows[-1], f"After epoch {rows[-1]['epoch']} {subject[0].lower()}{subject[1:]}"


def _figures(run: RunRecords, split: str, record: Row, subject: str) -> Iterator[Sentence]:
    """How good the model is, and whether that is better than chance."""
    if not record:
        yield Sentence("Nothing says how good the model is on images that it was not trained on.", "doubt")
        return
    name, count = SPLITS[split], record.get("count") or 0
    metric = run.main_metric
    if record.get(metric) is None:
        yield Sentence(f"{subject}'s output is NaN or infinite for {name} images, so there are no figures.", "doubt")
        return
    counts = images_of_classes(record)
    if run.info.multi_label:
        yield Sentence(
            f"{subject} has a mean average precision of {record[metric]:.1%} on {_images(count, name)}.", "lead"
        )
        present = [images / count for images in counts if images] if count else []
        if present:
            yield Sentence(f"To rank the images at random would give about {sum(present) / len(present):.1%}.", "lead")
        return
    low, high = interval_of(record) or (0.0, 1.0)
    yield Sentence(
        f"{subject} is right on {record[metric]:.1%} of {_images(count, name)} "
        f"(95% interval: {100 * low:.1f} to {high:.1%}).",
        "lead",
    )
    yield from _against_chance(run.info.classes, counts, name, low, high)
    confusion = record.get("confusion")
    said = [label for label in range(len(counts)) if any(row[label] for row in confusion)] if confusion else []
    if len(said) == 1 and sum(count > 0 for count in counts) > 1:
        yield Sentence(f"It names one class, {run.info.classes[said[0]]}, for all {_images(count, name)}.", "doubt")


def _against_chance(
    classes: Sequence[str], counts: Sequence[int], name: str, low: float, high: float
) -> Iterator[Sentence]:
    """Whether an accuracy between `low` and `high` is better than to name the largest class for every image.

    `counts`: the images of each class; [] if they are not known.
    """
    total = sum(counts)
    if not total:
        return
    share, largest = max(counts) / total, classes[max(range(len(counts)), key=counts.__getitem__)]
    if share == 1:
        yield Sentence(f"All {name} images are of one class, {largest}, so this says little.", "doubt")
        return
    baseline = f"to say {largest}, the most frequent class, for every image, which is right on {share:.1%}"
    if counts.count(max(counts)) == sum(count > 0 for count in counts):
        baseline = f"to say one class for every image, which is right on {share:.1%}"
    if low > share:
        yield Sentence(f"This is better than {baseline}.", "lead")
    elif high < share:
        yield Sentence(f"This is worse than {baseline}.", "doubt")
    else:
        yield Sentence(f"This is not clearly better than {baseline}.", "doubt")


def _ending(run: RunRecords) -> Iterator[Sentence]:
    """How far the run has come, if not to its end, and what was not finite."""
    planned, result, status = run.config.epochs, run.result, run.status
    if not result:
        state = {"training": "still trains", "interrupted": "was interrupted", "failed": "has failed"}
        state["stale"] = "died or was killed"
        did = state.get(str(status.get("state")), "has not finished")
        where = f" in epoch {status['epoch']} of {planned}" if "epoch" in status else ""
        yield Sentence(f"The run {did}{where}: what follows is what it has so far.", "warning")
    elif (by := result.get("stopped_by", "epochs")) != "epochs":
        why = {"patience": "the validation split did not improve any more (--stop.patience-epochs)",
               "hours": "its time was over (--stop.hours)"}  # fmt: skip
        done = f"It was stopped after {result.get('epochs', '?')} of {planned} epochs"
        yield Sentence(f"{done}, because {why.get(by, by)}.", "warning" if by == "hours" else "plain")
    skipped = result.get("left_out_updates") or status.get("left_out_updates") or 0
    if skipped:
        yield Sentence(f"{_many(skipped, 'update')} skipped because the loss or a gradient was not finite.", "warning")
    rows = [*run.evaluations("train", "model"), *run.held_out[1]]
    broken = sorted({row["epoch"] for row in rows if "loss" in row and row["loss"] is None})
    if broken:
        epochs = f"epoch{'s' * (len(broken) > 1)} {first_of([*map(str, broken)], 5)}"
        yield Sentence(f"The loss was NaN or infinite in {epochs}.", "warning")


def _course(run: RunRecords) -> Iterator[Sentence]:
    """The best epoch, or why nothing says which it was."""
    split, rows = run.held_out
    epochs = len({row["epoch"] for row in run.evaluations("train", "model")})
    best = best_of(run)
    if best is not None and len(rows) > 1:
        metric = metric_title(best.metric)
        text = f"The best epoch by the validation {metric} was {best.epoch} of {rows[-1]['epoch']} ({best.shown})"
        last = f"; the last one has {best.shown_last}" if best.epoch != rows[-1]["epoch"] else ", the last one"
        yield Sentence(f"{text}{last}.")
    if split != "val" and epochs > 1:
        yield Sentence("There is no validation split (--data.val-fraction), so nothing says which epoch was the best.")


def _data(run: RunRecords, split: str, record: Row) -> Iterator[Sentence]:
    """What is unusual in the data: images left out, files not used, classes without images, classes of unequal size."""
    left_out, unused = run.data.get("unreadable") or 0, run.data.get("unused")
    if left_out:
        yield Sentence(f"{_many(left_out, 'unreadable image')} left out (--data.skip-unreadable).", "warning")
    if unused:
        yield Sentence(f"Not used, but in the folder of the data: {unused}.", "warning")
    counts = {name: run.data[name]["class_images"] for name in SPLITS if name in run.data}
    if split and split not in counts and (evaluated := images_of_classes(record)):
        counts[split] = evaluated  # of other data than the run's
    for name, images in counts.items():
        empty = [each for each, count in zip(run.info.classes, images, strict=True) if not count]
        if empty:
            some = f"{len(empty)} of {len(images)} classes {'has' if len(empty) == 1 else 'have'}"
            yield Sentence(f"{some} no {SPLITS[name]} image: {first_of(empty, 10)}.", "warning")
    present = [count for count in counts.get("train", []) if count]
    if present and max(present) >= IMBALANCE * min(present):
        most = f"from {min(present):,} to {max(present):,}"
        yield Sentence(f"The classes differ much in their number of training images: {most}.", "warning")


def _images(count: int, name: str) -> str:
    return f"{count:,} {name} image{'s' * (count != 1)}"


def _many(count: int, name: str) -> str:
    return f"{count:,} {name} was" if count == 1 else f"{count:,} {name}s were"


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
        words=words_of(run, evaluation),
        facts=facts_of(run),
        charts=[draw(chart) for chart in charts_of_run(run) if not chart.is_empty],
        has_events=bool(run.events),
        figures=metric_table(run, records),
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
        machine=machine_of(run),
        costs=costs_of(run),
        notes=notes,
    )


def metric_table(run: RunRecords, records: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Each figure with its value for each of the weights."""
    rows = metric_rows(records, run.info.classes, run.config.metrics, multi_label=run.info.multi_label)
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


def machine_of(run: RunRecords) -> list[tuple[str, str]]:
    found = run.environment
    packages = found.get("packages") or {}
    rows = [
        ("processes", str(found.get("world_size", ""))),
        ("devices", run.devices),
        ("precision", str(found.get("precision", ""))),
        ("host", str(found.get("host", ""))),
        ("platform", str(found.get("platform", ""))),
        ("cores", str(found.get("cores", ""))),
        ("Python", str(found.get("python", ""))),
        *((str(name), str(version)) for name, version in packages.items()),
        ("CUDA", str(found.get("cuda") or "")),
        ("commit", str(found.get("commit") or "")),
    ]
    return [(name, value) for name, value in rows if value]


def costs_of(run: RunRecords) -> list[tuple[str, str]]:
    """What the run cost, its speed, and how often it was disturbed."""
    cost = cost_of(read_starts(run.path))
    rows = [("time", cost_text(cost))] if cost else []
    if hours := cost.get("accelerator_hours"):
        rows.append(("accelerator-hours", f"{hours:.3g}"))
    if speed := run.result.get("images_per_second"):
        rows.append(("speed of training", f"{speed:,.0f} images/s"))
    if skipped := sum(kind == "skipped" for kind, _ in run.events):
        rows.append(("events: skipped", str(skipped)))
    return rows


def check_page(option: str, path: Path) -> None:
    """Raise UserError if the page `path` that the `option` names cannot be written, or Jinja2 is not installed: before
    the work for it is done."""
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
