"""Figures of a split that follow from its labels and the model's logits: precision, recall, calibration, intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from accel_train.errors import first_of
from accel_train.records.metrics import figures_for

Floats = npt.NDArray[np.float64]

BINS = 15  # of the calibration error, as in Guo et al. 2017
NO_FIGURE = "\u2013"  # of a class without images
FIGURES = {  # key -> what the table calls it
    "balanced_accuracy": "balanced accuracy",
    "f1": "f1 (macro)",
    "precision": "precision (macro)",
    "recall": "recall (macro)",
    "weighted_precision": "precision (weighted)",
    "weighted_recall": "recall (weighted)",
    "weighted_f1": "f1 (weighted)",
    "calibration_error": "calibration error",
}
# What the table calls it -> the key of a list with a figure of each class.
CLASS_FIGURES = {name: f"class_{name}".replace(" ", "_") for name in ("average precision", "precision", "recall", "f1")}


def single_label_figures(logits: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Figures of images with one label each, from logits float32 [n, classes] and labels int64 [n].

    Precision, recall and F1 are scikit-learn's; "precision" and so on are means over the classes that occur as a label
    or as a prediction, "weighted_…" means weighted by the images of each class. "class_…" are lists, None for a class
    that does not occur. "balanced_accuracy": the mean recall of the classes that have an image. For the others see
    `accuracy_interval` (of "class_accuracy_interval" for each class that has an image: of its recall) and
    `calibration_error`.
    """
    predicted = logits.argmax(1)
    figures = _precision_and_recall(labels, predicted, logits.shape[1])
    return {
        "accuracy_interval": accuracy_interval(int((predicted == labels).sum()), len(labels)),
        "class_accuracy_interval": [
            accuracy_interval(hits, count) if count else None
            for hits, count in zip(
                np.bincount(labels[predicted == labels], minlength=logits.shape[1]).tolist(),
                np.bincount(labels, minlength=logits.shape[1]).tolist(),
                strict=True,
            )
        ],
        "balanced_accuracy": float(np.mean([figures["class_recall"][label] for label in np.unique(labels)])),
        **figures,
        "calibration_error": calibration_error(softmax(logits), labels),
    }


def multi_label_figures(logits: npt.NDArray[np.float32], labels: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Figures of images with several labels or none, at a probability of 0.5; as `single_label_figures`, as far as
    they have a meaning. labels: bool [n, classes]."""
    return _precision_and_recall(labels, logits >= 0, logits.shape[1])


def _precision_and_recall(labels: npt.NDArray[Any], predicted: npt.NDArray[Any], classes: int) -> dict[str, Any]:
    from sklearn.metrics import precision_recall_fscore_support

    names = ("precision", "recall", "f1")
    *of_each, images = precision_recall_fscore_support(labels, predicted, labels=range(classes), zero_division=0)
    said = predicted.sum(0) if predicted.ndim == 2 else np.bincount(predicted, minlength=classes)
    occurs = (images > 0) | (said > 0)
    figures: dict[str, Any] = {}
    for name, values in zip(names, of_each, strict=True):
        figures[name] = float(values[occurs].mean()) if occurs.any() else 0.0
        figures[f"weighted_{name}"] = float(np.average(values, weights=images)) if images.any() else 0.0
    return figures | {
        f"class_{name}": [float(value) if known else None for value, known in zip(values, occurs, strict=True)]
        for name, values in zip(names, of_each, strict=True)
    }


def accuracy_interval(hits: int, count: int) -> tuple[float, float]:
    """The 95 % interval of an accuracy of `hits` in `count` images: (lowest, highest).

    All accuracies that a two-sided test at 0.05 does not reject (Wilson 1927, "Probable inference, the law of
    succession, and statistical inference", J. Am. Stat. Assoc. 22). Also all of a few images right leaves a doubt: 10
    of 10 give 72 % to 100 %, where a bootstrap would give 100 % to 100 %.
    """
    z = NormalDist().inv_cdf(0.975)
    accuracy, squared = hits / count, z * z / count
    middle = (accuracy + squared / 2) / (1 + squared)
    half = z * math.sqrt(accuracy * (1 - accuracy) / count + squared / count / 4) / (1 + squared)
    # Of all or nothing the bound is exact; rounding may miss it.
    return 0.0 if hits == 0 else middle - half, 1.0 if hits == count else middle + half


def interval_of(record: Mapping[str, Any]) -> tuple[float, float] | None:
    """The 95 % interval of a record's accuracy; None if it has no accuracy."""
    accuracy, count = record.get("accuracy"), record.get("count")
    if accuracy is None or not count:
        return None
    low, high = record.get("accuracy_interval") or accuracy_interval(round(accuracy * count), count)
    return low, high


def interval_text(interval: Sequence[float] | None) -> str:
    """An interval of a fraction, in percent, as tables show it: "72.2 … 100.0%"; "" if there is none."""
    return "" if interval is None else f"{100 * interval[0]:.1f} … {interval[1]:.1%}"


def softmax(logits: npt.NDArray[np.float32]) -> Floats:
    """Probabilities float64 [n, classes]."""
    from scipy.special import softmax as scipy_softmax

    probabilities: Floats = scipy_softmax(logits.astype(np.float64), axis=1)
    return probabilities


def calibration_error(probabilities: Floats, labels: npt.NDArray[np.int64]) -> float:
    """The expected calibration error: the mean over the images of |accuracy - mean probability| of their bin.

    The images are divided by the probability of the predicted class into BINS bins of equal width (Guo et al. 2017,
    arxiv.org/abs/1706.04599, equation 3).
    """
    confidence = probabilities.max(1)
    hits = probabilities.argmax(1) == labels
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    inside = [bins == number for number in np.unique(bins)]
    return float(sum(part.mean() * abs(hits[part].mean() - confidence[part].mean()) for part in inside))


def figure_rows(
    records: Sequence[Mapping[str, Any]], classes: Sequence[str], chosen: Sequence[str], *, multi_label: bool
) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the key of each figure that a record has, what a table calls it, and its value for each record.

    After "accuracy" comes its 95 % interval, with the key "accuracy_interval". `chosen`: by --metrics.
    """
    known = figures_for(chosen, multi_label=multi_label)
    undefined = {each.name for each in known if each.chosen}  # which may be NaN
    forms = {each.name: (each.name, each.form) for each in known if len(classes) >= each.fewest_classes}
    for key, (title, form) in (forms | {key: (title, ".2%") for key, title in FIGURES.items()}).items():
        values = [record.get(key) for record in records]
        is_nan = key in undefined and any(key in record for record in records)  # JSON has no NaN
        if is_nan or any(value is not None for value in values):
            yield key, title, [("NaN" if is_nan else "") if value is None else format(value, form) for value in values]
        if key == "accuracy" and any(intervals := [interval_of(record) for record in records]):
            yield "accuracy_interval", "95% interval", [interval_text(interval) for interval in intervals]


def images_of_classes(record: dict[str, Any]) -> list[int]:
    """How many images of each class were evaluated; [] if that is not known."""
    confusion = record.get("confusion")
    images: list[int] = record.get("class_images", []) if confusion is None else [sum(row) for row in confusion]
    return images


def without_images(record: dict[str, Any], classes: Sequence[str], split: str) -> str:
    """Which classes the split has no image of: "no test images: cat, dog (2 of 10 classes)". Or ""."""
    names = [name for name, count in zip(classes, images_of_classes(record), strict=True) if not count]
    return f"no {split} images: {first_of(names, 10)} ({len(names)} of {len(classes)} classes)" if names else ""
