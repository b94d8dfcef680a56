"""What a run's model answered for each image of a split, and whether two runs were asked the same images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import log_expit, softmax

from accel_train.analysis.predictions import Predictions
from accel_train.data.sources.load import IN_MEMORY

CHUNK = 4096  # images whose probabilities are in memory at once: a large test split has some 50 million


@dataclass(frozen=True)
class Answers:
    """One for each of n images, in the order of their numbers in the split. Far smaller than the logits: 60 runs fit
    into memory."""

    split: str
    weights: str
    """The file: model.safetensors, or ema.safetensors if the run has an EMA."""
    classes: tuple[str, ...]
    labels: npt.NDArray[Any]
    """int64 [n], or bool [n, classes] if an image may have several labels."""
    right: npt.NDArray[np.bool_]
    """[n]: the predicted class is the label; with several labels: all of them are right, at a probability of 0.5."""
    said: npt.NDArray[Any]
    """As `labels`: what was predicted."""
    chance_said: npt.NDArray[np.float32]
    """[n]: the probability of the predicted class; with several labels: of the whole answer (the product)."""
    chance_true: npt.NDArray[np.float32]
    """[n]: the same of the true class or labels."""
    broken: int
    """Images for which the model's output is NaN or infinite: there is no answer."""
    names: list[str] | None = field(repr=False)
    """Of the image files, below the folder of the data; None: the images are in no files of their own."""
    chosen_by: Mapping[str, Any] = field(repr=False)
    """The settings that decide which images the split has."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def multi_label(self) -> bool:
        return self.labels.ndim == 2


def answers_of(predictions: Predictions, seed: int) -> Answers:
    """What the kept `predictions` of a run say; `seed`: the run's, by which a split may have been drawn."""
    labels, logits, about = predictions.labels, predictions.logits, predictions.about
    said = logits >= 0 if labels.ndim == 2 else logits.argmax(1)
    right = (said == labels).all(1) if labels.ndim == 2 else said == labels
    lost = ~(logits < np.inf).all(1) | ((logits == -np.inf).all(1))  # one of -infinity is a class that is left out
    split, data = str(about["split"]), about["data"]
    return Answers(
        split,
        str(about["weights"]),
        predictions.classes,
        labels,
        right,
        said,
        _chances(logits, said),
        _chances(logits, labels),
        int(lost.sum()),
        None if predictions.paths is None else [*_below_root(predictions.paths, data)],
        chosen_by(data, split, seed),
    )


def _chances(logits: npt.NDArray[np.float32], of: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The probability of a class of each image (int64 [n]), or of a set of labels (bool [n, classes])."""
    found = np.empty(len(logits), np.float32)
    with np.errstate(invalid="ignore"):  # of what is broken it is NaN
        for start in range(0, len(logits), CHUNK):
            part, wanted = logits[start : start + CHUNK].astype(np.float64), of[start : start + CHUNK]
            if of.ndim == 2:
                found[start : start + CHUNK] = np.exp(log_expit(np.where(wanted, part, -part)).sum(1))
            else:
                found[start : start + CHUNK] = softmax(part, axis=1)[np.arange(len(part)), wanted]
    return found


def _below_root(paths: list[str], data: Mapping[str, Any]) -> Iterator[str]:
    """The names of the files as they are on any machine, on which the data may be in another folder."""
    root = str(data["root"])
    if data["name"] == "csv":
        root = root.rpartition("/")[0]
    return (path.removeprefix(f"{root}/") for path in paths)


def chosen_by(data: Mapping[str, Any], split: str, seed: int) -> dict[str, Any]:
    """The settings of the data that decide which images are in a split, by the command line's names."""
    name = data["name"].removeprefix("torch/")
    keys = ["name", "test_limit", "skip_unreadable", "test_fraction"]
    if name not in IN_MEMORY:
        keys.append("root")  # published data sets are the same in any folder
    if split == "val":
        keys.append("val_fraction")
    if name == "synthetic":
        keys += ["image_size", "channels", "classes", "test_images"]
    found = {f"data.{key.replace('_', '-')}": data.get(key) for key in keys} | {"data.name": name}
    drawn = data.get("test_limit") or data.get("test_fraction") or (split == "val" and data.get("val_fraction"))
    return found | ({"seed": seed} if drawn else {})


def why_not_the_same(first: Answers, second: Answers) -> str:
    """Why the answers of two runs cannot be compared image by image; "" if the images are the same in the same order.

    Image files are the same if their names and labels are. Others have no names: there the settings that choose them
    must be equal, and the labels.
    """
    if first.split != second.split:
        return f"one was evaluated on its {first.split} split, the other on its {second.split} split"
    if first.classes != second.classes:
        return f"their classes differ: {_first_difference(first.classes, second.classes, 'class')}"
    if first.multi_label != second.multi_label:
        return "an image has one label for one of them, and several for the other"
    if len(first) != len(second):
        return f"one was evaluated on {len(first):,} images, the other on {len(second):,}"
    if (first.names is None) != (second.names is None):
        return "the images of one are files, those of the other are not"
    if first.names is None:
        for key in dict.fromkeys((*first.chosen_by, *second.chosen_by)):
            values = first.chosen_by.get(key), second.chosen_by.get(key)
            if values[0] != values[1]:
                return (
                    f"{key} decides which images are in the {first.split} split, and differs: {values[0]}, {values[1]}"
                )
    elif first.names != second.names:
        return f"they are different files: {_first_difference(first.names, second.names or (), 'image')}"
    if not np.array_equal(first.labels, second.labels):
        return "the labels of the images differ"
    for answers, which in ((first, "first"), (second, "second")):
        if answers.broken:
            return f"the output of the {which} is NaN or infinite for {answers.broken:,} of {len(answers):,} images"
    return ""


def _first_difference(first: Any, second: Any, what: str) -> str:
    if len(first) != len(second):
        return f"{len(first)} and {len(second)}"
    number = next(number for number in range(len(first)) if first[number] != second[number])
    return f"{what} {number} is {first[number]} and {second[number]}"
