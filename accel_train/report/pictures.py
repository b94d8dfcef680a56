"""The images that a model is most wrong about, as the model saw them."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from scipy.special import expit, log_expit, log_softmax, softmax

from accel_train.analysis.predictions import Predictions
from accel_train.analysis.preprocessing import Preprocessing
from accel_train.config.schema import Config
from accel_train.data.sources.splits import Source
from accel_train.errors import UserError
from accel_train.records.model_info import ModelInfo

WORST = 20
SMALL = 64  # pixels: smaller images are kept without loss


@dataclass(frozen=True)
class Picture:
    """One of the worst images, with its predicted and its true classes."""

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


def worst_pictures(
    predictions: Predictions, source: Source, info: ModelInfo, config: Config, count: int = WORST
) -> list[Picture]:
    """The `count` images with the highest loss that are classified wrongly; those that cannot be read are left out.

    `source`: the split that the predictions are of.
    """
    losses = losses_of(predictions)
    if predictions.labels.ndim == 2:
        wrong = ((predictions.logits >= 0) != predictions.labels).any(1)
    else:
        wrong = predictions.logits.argmax(1) != predictions.labels
    preprocessing = Preprocessing(info, config.augment)
    pictures: list[Picture] = []
    for id in np.flatnonzero(wrong)[np.argsort(-losses[wrong], kind="stable")].tolist():
        if len(pictures) == count:
            break
        try:
            pixels = torch.as_tensor(source.fetch([id])[0])
        except UserError:
            continue
        inputs = preprocessing.to_input(preprocessing.resize(pixels))[0]
        said, true = _said_and_true(predictions, id)
        small = info.image_size <= SMALL
        pictures.append(Picture(id, source.name(id), _uri(inputs, info), said, true, float(losses[id]), small))
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


def _uri(inputs: torch.Tensor, info: ModelInfo) -> str:
    """The normalised input, float32 [C, size, size], as an image again."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (info.mean, info.std))
    pixels = inputs * std + mean
    if info.full_scale == 1:  # a user's own float images may have any range
        pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp(min=1e-12)
    pixels = pixels if len(pixels) in (1, 3) else pixels[:1]
    array = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).squeeze(-1).numpy()
    file, kind = io.BytesIO(), "png" if info.image_size <= SMALL else "jpeg"
    Image.fromarray(array).save(file, format=kind, quality=85)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
