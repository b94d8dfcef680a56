"""What a trained model takes and what it gives: model.json in the run's folder.

With config.yaml and the weights it is all that is needed to use the model where the training data is not.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.errors import UserError
from accel_train.untrusted import is_count, is_number, read_ordinary

FILE = "model.json"
LARGEST = 1 << 14  # pixels of a side


@dataclass(frozen=True)
class ModelInfo:
    """Normalised images, float32 [b, channels, image_size, image_size] -> logits, float32 [b, classes]."""

    classes: tuple[str, ...]
    """Their names, in the order of the logits."""
    channels: int
    """3: RGB, 1: grey."""
    image_size: int
    """Height and width of the model's input, in pixels."""
    native_size: int | None
    """Height and width of the data's images, if all are alike and only then; others are brought to it first."""
    mean: tuple[float, ...]
    """Of each channel, in 0..1: subtracted."""
    std: tuple[float, ...]
    """Of each channel, in 0..1: divided by."""
    semantics: int = 1
    """Of the training: see semantics.py."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def read_model_info(run: Path) -> ModelInfo:
    """The info of the model that was trained in the folder `run`. Raises UserError."""
    path = run / FILE
    try:
        found: dict[str, Any] = json.loads(read_ordinary(path, follow=True))
        for name in ("classes", "mean", "std"):
            if not isinstance(found[name], list):
                raise TypeError(f"{name} is no list")
            found[name] = tuple(found[name])
        info = ModelInfo(**found)
        if name := _impossible(info):
            raise ValueError(f"{name} is {str(found[name])[:40]}")
        return info
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): a run's folder needs config.yaml, {FILE} and the weights."
        ) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error!r}); copy it anew from where the model was trained.") from error


def _impossible(found: ModelInfo) -> str:
    """The name of a value that no model of ours has, or ""."""
    native, channels = found.native_size, found.channels
    fits = {
        "classes": len(found.classes) >= 2 and all(isinstance(name, str) for name in found.classes),
        "channels": is_count(channels) and channels in (1, 3),
        "image_size": is_count(found.image_size, 1, LARGEST),
        "native_size": native is None or is_count(native, 1, LARGEST),
        "mean": len(found.mean) == channels and all(is_number(value, -1e6, 1e6) for value in found.mean),
        "std": len(found.std) == channels and all(is_number(value, 0, 1e6) and value > 0 for value in found.std),
    }
    return next((name for name, fit in fits.items() if not fit), "")
