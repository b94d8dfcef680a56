"""Images of a page: those that the model is most wrong about, as the model saw them, as data: URIs."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import expit, log_expit, log_softmax, softmax

from accel_train.config.schema import Config
from accel_train.data.sources.files.images import to_image
from accel_train.data.sources.splits import Source
from accel_train.errors import UserError
from accel_train.records.model_info import ModelInfo
from accel_train.tools.inference import Preprocessing
from accel_train.tools.predictions import Predictions

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
