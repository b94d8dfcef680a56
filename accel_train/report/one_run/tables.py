"""What an evaluation has found: the few figures that the page begins with, and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accel_train.analysis.figures import (
    CLASS_FIGURES,
    NO_FIGURE,
    accuracy_interval,
    figure_rows,
    images_of_classes,
    interval_of,
    interval_text,
    without_images,
)
from accel_train.report.one_run.words import shown_record
from accel_train.report.shared.names import SPLITS, figure_title
from accel_train.report.shared.records import Row, RunRecords

HEAT_MAP = 50  # classes at most; of more, the most confused pairs are listed
PAIRS = 50


@dataclass(frozen=True)
class Tile:
    """A figure in large letters."""

    value: str
    name: str
    interval: str = ""
    """Its 95 % interval; "" if none is known."""


def headline_of(run: RunRecords, evaluation: Row) -> list[Tile]:
    """The main figure and those of --metrics, of the EMA first if there is one. Without an evaluation that of the
    result, or of the newest epoch."""
    shown: list[tuple[str, Row]] = [(name, evaluation[name]) for name in ("ema", "model") if name in evaluation]
    split = str(evaluation.get("split", ""))
    if not shown:
        split, record, _ = shown_record(run, {})
        shown = [(str(record.get("weights", "model")), record)] if record else []
    tiles = []
    for weights, record in shown:
        suffix = f", {weights}" if len(shown) > 1 or weights == "ema" else ""
        for figure in run.figures:
            if not (figure.name == run.main_figure or figure.chosen) or figure.name not in record:
                continue
            value = record[figure.name]
            shown_value = "NaN" if value is None else figure.show(value)
            interval = interval_of(record) if figure.name == "accuracy" else None
            title = f"{SPLITS[split]} {figure_title(figure.name)}{suffix}"
            tiles.append(Tile(shown_value, title, interval_text(interval)))
    return tiles


def figure_table(run: RunRecords, records: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Each figure with its value for each of the weights."""
    rows = figure_rows(records, run.info.classes, run.config.metrics, multi_label=run.info.multi_label)
    return [(figure_title(key) if title == key else title, values) for key, title, values in rows]


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
    columns = {title: known[key] for title, key in CLASS_FIGURES.items() if key in known}
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
            row.append(_cell(values[label] if images[split][label] else None, NO_FIGURE * (not images[split][label])))
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
