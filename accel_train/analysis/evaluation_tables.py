"""What `accel-train evaluate` prints: a table of the figures, and one of the classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accel_train.analysis.figures import TEMPERATURES
from accel_train.errors import first_of, print_line
from accel_train.records.metrics import metrics_for
from accel_train.records.table import print_table

LOWEST, HIGHEST = TEMPERATURES
SHOWN = 20  # at most so many classes are printed

NO_FIGURE = "\u2013"  # of a class without images
PERCENT = ".2%"
FIGURES = {  # key -> (what the table calls it, its form)
    "balanced_accuracy": ("balanced accuracy", PERCENT),
    "f1": ("f1 (macro)", PERCENT),
    "precision": ("precision (macro)", PERCENT),
    "recall": ("recall (macro)", PERCENT),
    "weighted_precision": ("precision (weighted)", PERCENT),
    "weighted_recall": ("recall (weighted)", PERCENT),
    "weighted_f1": ("f1 (weighted)", PERCENT),
    "calibration_error": ("calibration error", PERCENT),
}


def print_figures(records: dict[str, dict[str, Any]], classes: Sequence[str], *, multi_label: bool) -> None:
    """Print a row for each figure and a column for each of the weights. `records`: "model" and, if there is one, "ema",
    as evaluation-SPLIT.json has them."""
    forms = {
        metric.name: (metric.name, metric.form)
        for metric in metrics_for(multi_label=multi_label)
        if len(classes) >= metric.fewest_classes
    } | FIGURES
    rows = []
    for key, (title, form) in forms.items():
        values = [record.get(key) for record in records.values()]
        if any(value is not None for value in values):
            rows.append([title, *("" if value is None else format(value, form) for value in values)])
        intervals = [record.get("accuracy_interval") for record in records.values()]
        if key == "accuracy" and any(intervals):
            rows.append(
                ["  95% interval", *("" if each is None else f"{each[0]:.2%} … {each[1]:.2%}" for each in intervals)]
            )
    print_line("")
    head = ["", *(record["weights"] for record in records.values())]
    print_table(head, rows, numbers=head[1:])
    scaled = list(records.values())[-1].get("temperature")
    if scaled:
        kind = "the temperature fitted on"
        if scaled["at_bound"]:
            kind = f"not a fitted temperature, because a bound of the search ({LOWEST:g} to {HIGHEST:g}) is as good on"
        print_line("")
        print_line(
            f"With the logits divided by {scaled['value']:.3f}, {kind} {scaled['split']}: "
            f"loss {scaled['loss']:.4f}, calibration error {scaled['calibration_error']:.2%}. The accuracy is the same."
        )


def images_of_classes(record: dict[str, Any]) -> list[int]:
    """How many images of each class were evaluated."""
    confusion = record.get("confusion")
    images: list[int] = record["class_images"] if confusion is None else [sum(row) for row in confusion]
    return images


def without_images(record: dict[str, Any], classes: Sequence[str], split: str) -> str:
    """Which classes the split has no image of: "no test images: cat, dog (2 of 10 classes)". Or ""."""
    names = [name for name, count in zip(classes, images_of_classes(record), strict=True) if not count]
    return f"no {split} images: {first_of(names, 10)} ({len(names)} of {len(classes)} classes)" if names else ""


def print_classes(record: dict[str, Any], classes: Sequence[str], split: str) -> None:
    """Print a row for each class, of the last weights (the EMA's if there is one), and which have no image in `split`.

    Of more than SHOWN classes only those with the lowest recall (or average precision) are printed.
    """
    _print_rows(record, classes)
    if empty := without_images(record, classes, split):
        print_line("")
        print_line(empty)


def _print_rows(record: dict[str, Any], classes: Sequence[str]) -> None:
    confusion, images = record.get("confusion"), images_of_classes(record)
    all_columns = {
        "average precision": record.get("class_average_precision"),
        "precision": record.get("class_precision"),
        "recall": record.get("class_recall"),
        "f1": record.get("class_f1"),
    }
    columns: dict[str, Any] = {title: values for title, values in all_columns.items() if values is not None}
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
    rows = [
        [
            classes[label],
            str(images[label]),
            *(_percent(values[label]) if images[label] else NO_FIGURE for values in columns.values()),
        ]
        for label in labels
    ]
    if confusion is not None:
        for label, row in zip(labels, rows, strict=True):
            confused = confusion[label]
            other = max((number for number in range(len(classes)) if number != label), key=confused.__getitem__)
            row.append(f"{classes[other]} ({confused[other]})" if confused[other] else "")
    print_table([*head, *["most often confused with"] * (confusion is not None)], rows, numbers=head[1:])


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"
