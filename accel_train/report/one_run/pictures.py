"""Images of the evaluated split, as the model saw them: those that it is most wrong about, and some right ones."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import expit, log_expit, log_softmax, softmax

from accel_train.analysis.inference.preprocessing import Preprocessing
from accel_train.analysis.predictions import Predictions
from accel_train.config.schema import Config
from accel_train.data.sources.splits import Source
from accel_train.errors import UserError
from accel_train.records.model_info import ModelInfo
from accel_train.report.shared.images import input_uri

WORST = 20
RIGHT = 10


@dataclass(frozen=True)
class Picture:
    """An image with its predicted and its true classes."""

    name: str
    uri: str
    """The image as a data: URI."""
    said: str
    true: str
    loss: float


def worst_and_right(
    predictions: Predictions, source: Source, info: ModelInfo, config: Config
) -> tuple[list[Picture], list[Picture]]:
    """The WORST images with the highest loss that are classified wrongly, and RIGHT of those that are classified
    rightly; images that cannot be read are left out.

    The right ones are drawn at random but always the same: they show what is usual, which those with the lowest loss
    would not. `source`: the split that the predictions are of.
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

    wrong, right = np.flatnonzero(~is_right), np.flatnonzero(is_right)
    worst = pictures(wrong[np.argsort(-losses[wrong], kind="stable")])
    usual = pictures(np.random.default_rng(0).permutation(right))
    return [*itertools.islice(worst, WORST)], [*itertools.islice(usual, RIGHT)]


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
