"""The inputs and outputs of a trained model: model.json in the run directory.

With it, config.yaml and the weights the model can be used without the training data.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_train import __version__
from accel_train.config.compatibility import FORMAT, check_format
from accel_train.config.schema import Origin
from accel_train.errors import UserError
from accel_train.files import is_count, is_number, parse_json, read_regular_file
from accel_train.task import ONE_LABEL, SEVERAL_LABELS, Task

FILE = "model.json"
LARGEST = 1 << 14  # height or width of an image, in pixels


@dataclass(frozen=True)
class ModelInfo:
    """Input: normalised images, float32 [b, channels, image_size, image_size]. Output: logits, float32 [b, classes].

    Training may have had smaller or larger ones, see `training_size`.
    """

    classes: tuple[str, ...]
    """The names of the classes, in the order of the logits."""
    channels: int
    """3: RGB, 1: grey; others of a user's data."""
    image_size: int
    """Height and width of the model's input, in pixels."""
    native_size: int | None
    """Height and width of the dataset's images if all have the same size, else None. Other images are resized to it."""
    mean: tuple[float, ...]
    """Subtracted from each channel, whose values are from 0 to 1."""
    std: tuple[float, ...]
    """Divides each channel after that."""
    full_scale: int = 255
    """The pixel value that `mean` and `std` count as 1: 255 of uint8 images, 1 of a user's float tensors."""
    origin: Origin = field(default_factory=Origin)
    """Of the weights that the run began from."""
    task: Task = ONE_LABEL
    """Whether an image has one label, or may have several. In the file: "multi_label"."""
    trained_at: int | None = None
    """Height and width of the images in training, for which the model was created; None: image_size."""

    @property
    def training_size(self) -> int:
        """Height and width of the images for which the model was created."""
        return self.trained_at or self.image_size

    def at_size(self, size: int | None) -> ModelInfo:
        """The same for images of another size; None: for the same."""
        if size is None or size == self.image_size:
            return self
        return dataclasses.replace(self, image_size=size, trained_at=self.training_size)

    @property
    def takes_files(self) -> bool:
        """Whether image files can be prepared for the model: not if a user's own data made tensors of another kind."""
        return self.full_scale == 255 and self.channels in (1, 3)

    def to_json(self) -> str:
        values = vars(self) | {"origin": dataclasses.asdict(self.origin), "task": self.task is SEVERAL_LABELS}
        named = {"multi_label" if name == "task" else name: value for name, value in values.items()}
        return json.dumps({"format": FORMAT, "version": __version__, **named}, indent=2) + "\n"


def read_model_info(run: Path) -> ModelInfo:
    """Read the ModelInfo of the run in the folder `run`. Raises UserError if it is missing, damaged or of another
    version."""
    path = run / FILE
    try:
        values: dict[str, Any] = parse_json(read_regular_file(path, follow=True))
        check_format(path, values.pop("format", None), values.pop("version", None))
        for name in ("classes", "mean", "std"):
            if not isinstance(values[name], list):
                raise TypeError(f"{name} is not a list")
            values[name] = tuple(values[name])
        values["origin"] = _read_origin(values["origin"])
        several = values.pop("multi_label", False)
        if not isinstance(several, bool):
            raise ValueError(f"multi_label is {str(several)[:40]}")
        info = ModelInfo(task=SEVERAL_LABELS if several else ONE_LABEL, **values)
        if name := _impossible(info):
            raise ValueError(f"{name} is {str(values[name])[:40]}")
        return info
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): the folder of a run needs config.yaml, {FILE} and the weights."
        ) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error!r}); copy it again from where the model was trained.") from error


def _impossible(info: ModelInfo) -> str:
    """Return the name of a value that no trained model can have, or ""."""
    native, channels = info.native_size, info.channels
    fits = {
        "classes": len(info.classes) >= 2 and all(map(_is_text, info.classes)),
        "channels": is_count(channels, 1, LARGEST),
        "image_size": is_count(info.image_size, 1, LARGEST),
        "trained_at": is_count(info.training_size, 1, LARGEST),
        "native_size": native is None or is_count(native, 1, LARGEST),
        "mean": len(info.mean) == channels and all(is_number(value, -1e6, 1e6) for value in info.mean),
        "full_scale": info.full_scale in (1, 255),
        "std": len(info.std) == channels and all(is_number(value, 0, 1e6) and value > 0 for value in info.std),
    }
    return next((name for name, fit in fits.items() if not fit), "")


def _is_text(name: Any) -> bool:
    """Whether it is a text that can be written to a file. The bytes of a folder's name that are no UTF-8 can, too."""
    try:
        name.encode(errors="surrogateescape")
    except (AttributeError, UnicodeEncodeError):
        return False
    return True


def _read_origin(saved: Any) -> Origin:
    """Return the Origin that a file contains as JSON. Raises ValueError and TypeError if it cannot be one."""
    values = dict(saved)
    for name in ("mean", "std"):
        if values.get(name) is not None:
            values[name] = tuple(float(number) for number in values[name])
    origin = Origin(**values)
    texts = origin.weights, origin.sha256
    if not all(isinstance(text, str) for text in texts) or type(origin.image_size) not in (int, type(None)):
        raise ValueError(f"origin is {str(saved)[:40]}")
    return origin
