"""Whether what `augment` asks for fits the images and the model's input."""

from __future__ import annotations

from accel_train.config.schema import Augment
from accel_train.data.transforms.parameters import Jitter, jitter_strengths
from accel_train.errors import UserError


def check_channels(augment: Augment, channels: int, full_scale: int) -> None:
    """Raise UserError if images with this number of channels, and this pixel value for white, cannot be augmented."""
    strengths = jitter_strengths(augment)
    needs = {
        f"policy {augment.policy}": augment.policy != "none",
        "degrees, translate, zoom and shear": augment.turns,
        "perspective": augment.perspective > 0,
        "own": augment.own != "none",
        "color-jitter": any(strengths),
    }
    for option in (option for option, is_set in needs.items() if is_set):
        if full_scale != 255:
            raise UserError(
                f"--augment.{option}: needs images of uint8; the data has float tensors. Return uint8 tensors or PIL "
                "images from the Dataset, or turn it off."
            )
        if channels not in (1, 3) and option != "own":
            raise UserError(
                f"--augment.{option}: needs images of 1 or 3 channels; the data has {channels}. Turn it off."
            )
    if channels == 1 and strengths[Jitter.HUE] > 0:
        raise UserError("--augment.color-jitter: the images are grey and have no hue; give 0 as the fourth number.")
    found = len(augment.fill)
    if found not in (0, 1, channels):
        raise UserError(f"--augment.fill: found {found} numbers; expected one, or {channels}, one of each channel.")
    if channels != 3 and augment.grey > 0:
        raise UserError(f"--augment.grey: needs colour images; the data has {channels} channels. Use 0.")


def check_resize(augment: Augment, size: int) -> None:
    """Raise UserError if images are resized to less than the input of `size` pixels."""
    if augment.resize is not None and augment.resize < size:
        raise UserError(
            f"--augment.resize: found {augment.resize}, but the model's input has {size} pixels; use {size} or more."
        )
