"""An image as a data: URI, for a page that loads nothing."""

from __future__ import annotations

import base64
import io

import torch

from accel_train.analysis.inference.preprocessing import Preprocessing
from accel_train.data.sources.files.images import to_image
from accel_train.data.sources.splits import Source
from accel_train.records.model_info import ModelInfo

SMALL = 64
"""Pixels: smaller images are kept without loss, as PNG, and base.html shows the pixels of each PNG."""


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
