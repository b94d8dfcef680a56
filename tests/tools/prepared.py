"""The input of an exported model, made as the script in docs/export.md makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps


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
