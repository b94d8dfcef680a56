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

FILE = "model.json"


@dataclass(frozen=True)
class Signature:
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


def read_signature(run: Path) -> Signature:
    """The signature of the model that was trained in the folder `run`. Raises UserError."""
    path = run / FILE
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        for name in ("classes", "mean", "std"):
            found[name] = tuple(found[name])
        return Signature(**found)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): a run's folder needs config.yaml, {FILE} and the weights."
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged ({error!r}); copy it anew from where the model was trained.") from error
