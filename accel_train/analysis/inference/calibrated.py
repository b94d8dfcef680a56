"""The temperature that an evaluation has fitted, for the probabilities of new images.

A temperature belongs to the weights and to the size of the images that it was fitted with: it is used for no others.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.analysis.figures import TEMPERATURES
from accel_train.config.schema import Augment
from accel_train.errors import one_line
from accel_train.files import sha256
from accel_train.records.model_info import ModelInfo
from accel_train.untrusted import is_count, is_number, read_json_object


@dataclass(frozen=True)
class Calibration:
    """Whether the probabilities of a model are calibrated."""

    temperature: float | None
    """The number by which the logits are divided; None: there is none that can be used."""
    text: str
    """For the user: by what the probabilities are calibrated, or why they are not."""


def fitted_with(digest: str, image_size: int, augment: Augment) -> dict[str, Any]:
    """What a temperature is kept with: the SHA-256 of the weights and the sizes of the images."""
    return {"sha256": digest, "image_size": image_size, "resize": augment.in_evaluation(image_size).resize}


def find_calibration(run: Path, weights: Path, info: ModelInfo, augment: Augment) -> Calibration:
    """The calibration of the model whose `weights` file it is, by the run's newest evaluation of its test split.

    `info`, `augment`: how images are prepared for the model.
    """
    file = run / "evaluation-test.json"
    again = f"`accel-train evaluate {shlex.quote(str(run))}`"
    if info.multi_label:
        return _none("a temperature is for one label an image")
    if not file.exists():
        return _none(f"{again} fits a temperature, if the data has a validation and a test split")
    record = read_json_object(file)
    found = _temperature(record.get("ema"), weights, run) or _temperature(record.get("model"), weights, run)
    if found is None:
        return _none(f"{file} has no temperature for these weights. {again} fits one, if there is a validation split")
    value: Any = found.get("value")
    at_bound, count = found.get("at_bound"), found.get("count")
    if at_bound is True:
        return _none(f"the temperature in {file} is a bound of the search, not a fitted value")
    if not is_number(value, *TEMPERATURES) or at_bound is not False or not is_count(count, 1):
        return _none(f"the temperature in {file} is damaged, or of an older version. {again} fits it again")
    fits = fitted_with(_digest(weights), info.image_size, augment)
    if found.get("sha256") != fits["sha256"]:
        return _none(f"the temperature in {file} is of other weights. {again} fits one for these")
    if any(found.get(name) != size for name, size in fits.items()):
        return _none(f"the temperature in {file} is of images of another size. {again} fits one, with the same options")
    images = f"{count:,} validation image{'s' * (count != 1)}"
    text = f"calibrated: logits divided by {value:.3f}, the temperature fitted on {images} ({file})"
    return Calibration(float(value), one_line(text))


def not_with_views(tta: str) -> Calibration:
    """What is said of the probabilities with test-time augmentation."""
    return _none(f"a temperature is fitted without test-time augmentation ({tta})")


def _none(reason: str) -> Calibration:
    return Calibration(None, one_line(f"probabilities are not calibrated: {reason}."))


def _temperature(record: Any, weights: Path, run: Path) -> Mapping[str, Any] | None:
    """The temperature in the record of an evaluation, if that is of a file of this name."""
    if not isinstance(record, dict) or not isinstance(record.get("temperature"), dict):
        return None
    name = record.get("weights")
    same = isinstance(name, str) and Path(name).name == weights.name
    return dict(record["temperature"]) if same else None


def _digest(weights: Path) -> str:
    try:
        return sha256(weights)
    except OSError:  # a run that trains has deleted it
        return ""
