"""Images of the evaluated split, as the model saw them: those that it is most wrong about, and some right ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import expit, log_expit, log_softmax, softmax

from accel_train.analysis.inference.preprocessing import Preprocessing
from accel_train.analysis.predictions import Predictions
from accel_train.config.schema import Config
from accel_train.data.sources.splits import Source
from accel_train.errors import UserError
from accel_train.records.model_info import ModelInfo
from accel_train.report.shared.images import SMALL, image_uri

WORST = 20
RIGHT = 10


@dataclass(frozen=True)
class Picture:
    """An image with its predicted and its true classes."""

    id: int
    name: str
    uri: str
    """The image as a data: URI."""
    said: str
    true: str
    loss: float
    pixelated: bool
    """Whether it is so small that its pixels are to be seen."""


def losses_of(predictions: Predictions) -> npt.NDArray[np.float64]:
    """The loss of each image: cross-entropy, or with several labels an image the mean binary cross-entropy."""
    logits = predictions.logits.astype(np.float64)
    if predictions.labels.ndim == 2:
        losses: npt.NDArray[np.float64] = -np.where(predictions.labels, log_expit(logits), log_expit(-logits)).mean(1)
        return losses
    chosen: npt.NDArray[np.float64] = -log_softmax(logits, axis=1)[np.arange(len(logits)), predictions.labels]
    return chosen


def worst_pictures(predictions: Predictions, source: Source, info: ModelInfo, config: Config) -> list[Picture]:
    """The WORST images with the highest loss that are classified wrongly; those that cannot be read are left out.

    `source`: the split that the predictions are of.
    """
    wrong = np.flatnonzero(~_is_right(predictions))
    losses = losses_of(predictions)
    return _pictures(predictions, source, info, config, wrong[np.argsort(-losses[wrong], kind="stable")], WORST)


def right_pictures(predictions: Predictions, source: Source, info: ModelInfo, config: Config) -> list[Picture]:
    """RIGHT of the images that are classified rightly, drawn at random but always the same: they show what is usual,
    which those with the lowest loss would not."""
    right = np.flatnonzero(_is_right(predictions))
    return _pictures(predictions, source, info, config, np.random.default_rng(0).permutation(right), RIGHT)


def _is_right(predictions: Predictions) -> npt.NDArray[np.bool_]:
    if predictions.labels.ndim == 2:
        right: npt.NDArray[np.bool_] = ((predictions.logits >= 0) == predictions.labels).all(1)
    else:
        right = predictions.logits.argmax(1) == predictions.labels
    return right


def _pictures(
    predictions: Predictions,
    source: Source,
    info: ModelInfo,
    config: Config,
    ids: npt.NDArray[np.int64],
    most: int,
) -> list[Picture]:
    """The first `most` of the samples `ids` that can be read."""
    losses = losses_of(predictions)
    preprocessing = Preprocessing(info, config.augment)
    pictures: list[Picture] = []
    for id in ids.tolist():
        if len(pictures) == most:
            break
        try:
            pixels = torch.as_tensor(source.fetch([id])[0])
        except UserError:
            continue
        inputs = preprocessing.to_input(preprocessing.resize(pixels))[0]
        said, true = _said_and_true(predictions, id)
        small = info.image_size <= SMALL
        pictures.append(Picture(id, source.name(id), image_uri(inputs, info), said, true, float(losses[id]), small))
    return pictures


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
