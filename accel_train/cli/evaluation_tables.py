"""What `accel-train evaluate` prints: a table of the figures, and one of the classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accel_train.cli.table import print_table
from accel_train.errors import print_line
from accel_train.tools.evaluate_run import EvaluationResult
from accel_train.tools.figures import (
    CLASS_FIGURES,
    NO_FIGURE,
    figure_rows,
    images_of_classes,
    interval_text,
    without_images,
)

SHOWN = 20  # at most so many classes are printed


def print_figures(result: EvaluationResult) -> None:
    """Print a row for each figure and a column for each of the weights: the model's and, if there is one, the EMA's."""
    records = [result.figures[name] for name in ("model", "ema") if name in result.figures]
    rows = []
    classes = result.figures["classes"]
    for key, title, values in figure_rows(records, classes, result.chosen, multi_label=result.multi_label):
        rows.append([f"  {title}" if key == "accuracy_interval" else title, *values])
    print_line("")
    head = ["", *(record["weights"] for record in records)]
    print_table(head, rows, numbers=head[1:])


def print_classes(result: EvaluationResult) -> None:
    """Print a row for each class, of the last weights (the EMA's if there is one), and which have no image.

    Of more than SHOWN classes only those with the lowest recall (or average precision) are printed.
    """
    classes = result.figures["classes"]
    _print_rows(result.last, classes)
    if empty := without_images(result.last, classes, result.figures["split"]):
        print_line("")
        print_line(empty)


def _print_rows(record: dict[str, Any], classes: Sequence[str]) -> None:
    confusion, images = record.get("confusion"), images_of_classes(record)
    columns = {title: record[key] for title, key in CLASS_FIGURES.items() if key in record}
    intervals = record.get("class_accuracy_interval")
    first = "recall" if confusion is not None else "average precision"
    if first not in columns:  # the model's output is NaN
        return
    labels = list(range(len(classes)))
    if len(labels) > SHOWN:
        labels = [label for label in labels if images[label]]
    if len(labels) > SHOWN:
        labels = sorted(labels, key=lambda label: columns[first][label] or 0.0)[:SHOWN]
        print_line("")
        print_line(f"the {SHOWN} classes with the lowest {first}, of {len(classes)}:")
    else:
        print_line("")
    head = ["class", "images", *columns]
    behind = 2 + list(columns).index(first) + 1  # where the interval of the first figure is
    rows = []
    for label in labels:
        values = [column[label] for column in columns.values()]
        empty = NO_FIGURE if not images[label] else ""
        shown = [empty if value is None or empty else f"{value:.2%}" for value in values]
        rows.append([classes[label], str(images[label]), *shown])
        if intervals is not None:
            rows[-1].insert(behind, interval_text(intervals[label]))
    if intervals is not None:
        head.insert(behind, "95% interval")
    if confusion is not None:
        for label, row in zip(labels, rows, strict=True):
            confused = confusion[label]
            other = max((number for number in range(len(classes)) if number != label), key=confused.__getitem__)
            row.append(f"{classes[other]} ({confused[other]})" if confused[other] else "")
    print_table([*head, *["confused with"] * (confusion is not None)], rows, numbers=head[1:])
