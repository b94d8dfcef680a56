"""The options of the augmentation: the group `augment`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from accel_train.config.declaration import (
    ABOVE_0,
    ALL_POSITIVE,
    FRACTION,
    INTERVAL,
    JITTER,
    NEEDS_BOX,
    NEEDS_MIXING,
    NOT_NEGATIVE,
    OWN,
    POLICIES,
    POLICY,
    POSITIVE,
    Bound,
    Interpolation,
    Needs,
)
from accel_train.errors import UserError


@dataclass(frozen=True)
class Augment:
    resize: Annotated[int | None, POSITIVE] = None
    """Resize the short side to this many pixels before cropping, in evaluation, and in training if augment.crop is
    center or random."""
    crop_fraction: Annotated[float | None, ABOVE_0] = None
    """In evaluation the crop has this fraction of the image's short side, at any size, as with timm's crop_pct; in
    place of augment.resize. Training: as without either."""
    crop: Literal["center", "random", "resized", "squash"] = "center"
    """Training crop: the centre; a random position; torchvision's RandomResizedCrop (resized); or the whole image
    as a square (squash)."""
    pad: Annotated[int, NOT_NEGATIVE, Needs("augment.crop", ("random",))] = 0
    """Pixels to add on each side before a random crop; see augment.pad-mode."""
    pad_mode: Annotated[Literal["constant", "reflect"], Needs("augment.pad")] = "constant"
    """Padding: black (constant), or the image mirrored at its edge (reflect)."""
    scale: Annotated[tuple[float, float], INTERVAL, NEEDS_BOX] = (0.08, 1.0)
    """crop=resized: smallest and largest fraction of the image's area."""
    ratio: Annotated[tuple[float, float], INTERVAL, NEEDS_BOX] = (0.75, 4 / 3)
    """crop=resized: smallest and largest width / height."""
    interpolation: Interpolation = "bilinear"
    """How images are resized, in training and evaluation, with antialiasing; and how augment.policy
    turns them."""
    train_interpolation: Literal[Interpolation, "random"] | None = None
    """Another one in training; random: bilinear or bicubic, drawn for each image. Default: augment.interpolation."""
    flip: Annotated[float, FRACTION] = 0.0
    """Probability of a horizontal flip."""
    vertical_flip: Annotated[float, FRACTION] = 0.0
    """Probability of a vertical flip."""
    policy: Annotated[
        str,
        POLICY,
    ] = "none"
    """What changes the colours and geometry of each image. torchvision's randaugment, trivialaugment, augmix,
    autoaugment (the one for ImageNet), autoaugment_cifar10 and autoaugment_svhn; or timm's, as timm writes them:
    rand-m9-mstd0.5-inc1, augmix-m5-w4-d2, original-mstd0.5, v0, 3a, …"""
    own: Annotated[str, OWN] = "none"
    """Your own transform of each image after its crop, FILE.py:NAME, such as a rotation or a blur of torchvision, of
    albumentations, or a function (docs/augmentation.md)."""
    randaugment_ops: Annotated[int, POSITIVE, Needs("augment.policy", ("randaugment",))] = 2
    """randaugment: number of operations on each image."""
    randaugment_magnitude: Annotated[
        int,
        Bound("a number from 0 to 30", lambda x: 0 <= x <= 30),
        Needs("augment.policy", ("randaugment",)),
    ] = 9
    """randaugment: strength of each operation, 0 to 30, as in torchvision: 9 turns by 9 degrees. timm's rand-m9 turns
    by 27, and leaves out half of the operations."""
    color_jitter: Annotated[tuple[float, ...], JITTER] = ()
    """Colour jitter: strength of brightness, contrast, saturation and hue. One number sets the first three."""
    erase: Annotated[float, FRACTION] = 0.0
    """Probability of erasing a random rectangle (random erasing)."""
    erase_mode: Annotated[Literal["const", "rand", "pixel"], Needs("augment.erase")] = "const"
    """Fill erased rectangles with the mean colour (const), a random colour (rand), or a random colour of each pixel."""
    mixup: Annotated[float, NOT_NEGATIVE] = 0.0
    """Mixup: alpha of the Beta distribution; 0: off."""
    cutmix: Annotated[float, NOT_NEGATIVE] = 0.0
    """CutMix: alpha of the Beta distribution; 0: off. With Mixup on too, one of them is drawn, each as often as the
    other: augment.mix-mode."""
    mix_probability: Annotated[float, FRACTION, NEEDS_MIXING] = 1.0
    """Probability of mixing (Mixup or CutMix), of each pair: see augment.mix-mode."""
    mix_mode: Annotated[Literal["pair", "elem", "batch"], NEEDS_MIXING] = "pair"
    """What is mixed in one way, with one share: each pair; each sample (elem), with its neighbour; or all pairs of a
    virtual batch (batch)."""
    mean: tuple[float, ...] | None = None
    """Mean to subtract from each channel (0 to 1); default: that of the weights, else the data's."""
    std: Annotated[tuple[float, ...] | None, ALL_POSITIVE] = None
    """Standard deviation to divide each channel by (0 to 1); default: as for augment.mean."""

    @property
    def cuts(self) -> bool:
        """Whether CutMix is on."""
        return self.cutmix > 0

    @property
    def mixes(self) -> bool:
        """Whether neighbouring samples are mixed in pairs."""
        return self.mixup > 0 or self.cuts

    @property
    def timm_policy(self) -> bool:
        """Whether augment.policy is written as timm writes it."""
        return self.policy not in POLICIES

    @property
    def draws_globally(self) -> bool:
        """Whether something draws from a global generator, which must be seeded for each image."""
        return self.policy != "none" or self.own != "none" or self.crop == "random"

    @property
    def each_image(self) -> bool:
        """Whether images of one size, too, are augmented one at a time, by data workers."""
        transforms = self.policy != "none" or self.own != "none"
        return transforms or self.crop not in ("center", "random") or self.train_interpolation == "random"

    def in_evaluation(self, size: int) -> Augment:
        """The same for an evaluation with an input of `size` pixels: `crop_fraction` has become the `resize` that it is
        there, rounded down as in timm's transforms_imagenet_eval."""
        if self.crop_fraction is None:
            return self
        return replace(self, resize=math.floor(size / self.crop_fraction), crop_fraction=None)

    def interpolation_of(self, *, training: bool) -> str:
        """How images are resized: an Interpolation, or random."""
        return self.train_interpolation or self.interpolation if training else self.interpolation


def check_channels(augment: Augment, channels: int, full_scale: int) -> None:
    """Raise UserError if images with this number of channels, and this pixel value for white, cannot be augmented."""
    needs = {
        f"policy {augment.policy}": augment.policy != "none",
        "own": augment.own != "none",
        "color-jitter": any(augment.color_jitter),
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
    if channels == 1 and any(augment.color_jitter[3:]):
        raise UserError("--augment.color-jitter: the images are grey and have no hue; give 0 as the fourth number.")


def check_resize(augment: Augment, size: int) -> None:
    """Raise UserError if images are resized to less than the input of `size` pixels."""
    if augment.resize is not None and augment.resize < size:
        raise UserError(
            f"--augment.resize: found {augment.resize}, but the model's input has {size} pixels; use {size} or more."
        )
