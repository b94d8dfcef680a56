"""preprocess.json: how an image file becomes the model's input, for programs that have neither torch nor this package.

docs/export.md documents the file, with a script that does the same as `prepare` here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from accel_train.config.schema import Augment
from accel_train.data.transforms.parameters import resize_default
from accel_train.records.model_info import ModelInfo

FILE = "preprocess.json"
VERSION = 1


def rules_of(info: ModelInfo, augment: Augment) -> dict[str, Any]:
    """The content of preprocess.json: what `Preprocessing` does."""
    files = info.takes_files
    return {
        "version": VERSION,
        "mode": {1: "L", 3: "RGB"}[info.channels] if files else None,
        "steps": _steps(info, augment) if files else None,
        "interpolation": augment.interpolation,  # the name is Pillow's, too
        "channels": info.channels,
        "size": info.image_size,
        "full_scale": info.full_scale,
        "mean": list(info.mean),
        "std": list(info.std),
        "range": None if info.range is None else list(info.range),  # of files that must be converted to 8 bits first
        "classes": list(info.classes),
        "multi_label": info.multi_label,
        "probabilities": "sigmoid" if info.multi_label else "softmax",
    }


def _steps(info: ModelInfo, augment: Augment) -> list[dict[str, int]]:
    """Each step resizes the short side and cuts the central square, whose corner is rounded half to even."""
    size, native = info.image_size, info.native_size
    augment = augment.in_evaluation(size)
    if native is None:
        return [{"resize": augment.resize or resize_default(size), "crop": size}]
    steps, side = [{"resize": native, "crop": native}], augment.resize or size
    if (side - size) % 4 == 3:
        # BatchTransform rounds the corner down. Half to even would round (side - size) / 2 up here: so first one row
        # and one column are cut off at the end, and then nothing is left to be rounded.
        steps += [{"resize": side, "crop": side - 1}, {"resize": side - 1, "crop": size}]
    elif (side, size) != (native, native):
        steps.append({"resize": side, "crop": size})
    return steps


def prepare(file: Path, rules: dict[str, Any]) -> npt.NDArray[np.float32]:
    """The model's input for an image file, float32 [channels, size, size], by the rules with Pillow and NumPy alone."""
    with Image.open(file) as opened:
        image = ImageOps.exif_transpose(opened).convert(rules["mode"])
    kernel = Image.Resampling[rules["interpolation"].upper()]
    for step in rules["steps"]:
        short = min(image.size)
        width, height = (int(step["resize"] * side / short) for side in image.size)
        image = image.resize((width, height), kernel)
        left, top = (round((side - step["crop"]) / 2) for side in image.size)
        image = image.crop((left, top, left + step["crop"], top + step["crop"]))
    pixels = np.asarray(image, np.float32).reshape(rules["size"], rules["size"], -1) / rules["full_scale"]
    normalised: npt.NDArray[np.float32] = (
        ((pixels - rules["mean"]) / rules["std"]).astype(np.float32).transpose(2, 0, 1)
    )
    return normalised
