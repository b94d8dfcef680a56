"""Transforms of one image at a time, in the worker processes: crop, resize, what policies.py and own.py do, flip.

Input and output are uint8, a quarter of float32's bytes. Transforms that work on a whole batch (normalisation, erasing,
mixing) run later on the device (batch.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2

from accel_train.config.schema import Augment
from accel_train.data.sources.files.images import LazyImage
from accel_train.data.transforms.parameters import Stream, resize_default
from accel_train.data.transforms.policies import image_steps
from accel_train.keyed import uniform, uniforms

TRIES = 10  # attempts to draw a box inside the image, as in torchvision


class ImageTransform:
    """Transforms images of any size into one uint8 tensor [b, C, size, size], channels last in memory.

    In training, an image's random parameters follow from its key alone. Training decodes a JPEG that is at least twice
    as large as needed at a smaller scale (see `LazyImage.reduced`), unless `decodes_smaller` is false. Evaluation
    decodes the full image.
    """

    def __init__(
        self,
        augment: Augment,
        size: int,
        *,
        training: bool,
        decodes_smaller: bool = True,
        mean: tuple[float, ...] = (0.0, 0.0, 0.0),
    ) -> None:
        """`mean`: of each channel, 0 to 1; timm's policies have this colour outside the image."""
        self.augment, self.size, self.training = augment, size, training
        self.decodes_smaller = training and decodes_smaller
        self.short_side = augment.resize or resize_default(size)
        self.resized_crop = training and augment.crop == "resized"
        self.interpolation = augment.interpolation_of(training=training)
        crops: list[torch.nn.Module] = []
        if not self.resized_crop:
            if training and augment.crop == "random":
                padding = {"padding": augment.pad or None, "padding_mode": augment.pad_mode}
                crops.append(v2.RandomCrop(size, pad_if_needed=True, **padding))
            else:
                crops.append(v2.CenterCrop(size))
        own: list[torch.nn.Module] = []
        if training and augment.own != "none":
            from accel_train.data.transforms.own import OwnTransform

            own = [OwnTransform(augment.own)]
        # The steps of an image that was resized so.
        self.steps = {}
        for mode in ("bilinear", "bicubic") if self.interpolation == "random" else (self.interpolation,):
            drawn = "random" if augment.timm_policy and self.interpolation == "random" else mode
            steps = image_steps(augment, size, drawn, mean) if training else []
            self.steps[mode] = torch.nn.Sequential(*crops, *steps, *own)
        self.is_random = training and augment.draws_globally
        self.draws_anywhere = training and (augment.timm_policy or augment.own != "none")
        """Whether NumPy's and Python's generators are used, too."""

    def __call__(self, images: Sequence[Tensor | LazyImage], keys: Tensor) -> Tensor:
        """`images`: each uint8 [C, H, W] or not yet decoded; `keys`: int64 [b]. Returns uint8 [b, C, size, size]."""
        modes = self._modes(keys)
        if self.resized_crop:
            boxes = drawn_boxes(images, keys, self.augment)
            decoded = (
                self._resized_crop(image, mode, *box) for image, box, mode in zip(images, boxes, modes, strict=True)
            )
        else:
            decoded = (self._whole(image, mode) for image, mode in zip(images, modes, strict=True))
        flips = drawn_flips(keys, self.augment, training=self.training)
        batch: Tensor | None = None
        with self._restored_generators():
            for index, (image, mode, word) in enumerate(zip(decoded, modes, keys.tolist(), strict=True)):
                self._seed_generators(word)
                image = self.steps[mode](image)
                if batch is None:
                    batch = image.new_empty((len(images), self.size, self.size, len(image)))
                batch[index] = (image.flip(flips[index]) if flips[index] else image).permute(1, 2, 0)
        assert batch is not None
        return batch.permute(0, 3, 1, 2)

    def _modes(self, keys: Tensor) -> Sequence[str]:
        """How each image is resized."""
        if self.interpolation != "random":
            return (self.interpolation,) * len(keys)
        return ["bicubic" if drawn else "bilinear" for drawn in (uniform(keys, Stream.INTERPOLATION) >= 0.5).tolist()]

    # What policies and the user's own transform draw from, all processes and workers seed with each image's key. It is
    # restored after the batch.
    def _restored_generators(self) -> AbstractContextManager[None]:
        if not self.draws_anywhere:  # torchvision's transforms draw from torch's CPU generator
            return torch.random.fork_rng(devices=[], enabled=self.is_random)
        from accel_train.data.sources.user.dataset import restored_generators

        return restored_generators()

    def _seed_generators(self, word: int) -> None:
        if self.draws_anywhere:
            from accel_train.data.sources.user.dataset import seed_generators

            seed_generators(word)
        elif self.is_random:
            torch.default_generator.manual_seed(word)  # torch.manual_seed would also seed GPUs

    def _whole(self, image: Tensor | LazyImage, mode: str) -> Tensor:
        """The whole image, resized to the short side."""
        if isinstance(image, LazyImage):
            reduction = self._reduction(image, min(image.height, image.width), self.short_side)
            if reduction > 1:
                box = 0, 0, image.height, image.width
                target = sides(image.height, image.width, self.short_side)
                return image.reduced(box, *target, reduction, mode)
            image = image.pixels()
        return resized_to_short_side(image, self.short_side, mode)

    def _resized_crop(
        self, image: Tensor | LazyImage, mode: str, top: int, left: int, height: int, width: int
    ) -> Tensor:
        """The box of the image, resized to size x size. It is cropped first, so that only its pixels are resized."""
        if isinstance(image, LazyImage):
            reduction = self._reduction(image, min(height, width), self.size)
            if reduction > 1:
                box = top, left, height, width
                return image.reduced(box, self.size, self.size, reduction, mode)
            image = image.pixels()
        crop = image[:, top : top + height, left : left + width]
        if crop.shape[1:] == (self.size, self.size):
            return crop
        return resized(crop, self.size, self.size, mode)

    def _reduction(self, image: LazyImage, side: int, needed: int) -> int:
        """The largest JPEG scale factor at which `side` pixels of the image still give `needed` pixels."""
        if not (self.decodes_smaller and image.reducible):
            return 1
        return max(factor for factor in (1, 2, 4, 8) if factor == 1 or side >= factor * needed)


def drawn_boxes(images: Sequence[Tensor | LazyImage], keys: Tensor, augment: Augment) -> list[list[int]]:
    """Top, left, height and width of each image's crop with crop=resized, drawn from the keys (int64 [b])."""
    sizes = torch.tensor([_size(image) for image in images])
    boxes: list[list[int]] = crop_boxes(keys, sizes[:, 0], sizes[:, 1], augment.scale, augment.ratio).tolist()
    return boxes


def drawn_flips(keys: Tensor, augment: Augment, *, training: bool) -> list[tuple[int, ...]]:
    """The dimensions along which each image [C, H, W] is flipped, drawn from the keys (int64 [b])."""
    flips: list[tuple[int, ...]] = [()] * len(keys)
    for dimension, stream, probability in (
        (1, Stream.VERTICAL_FLIP, augment.vertical_flip),
        (2, Stream.FLIP, augment.flip),
    ):
        if training and probability:
            flipped = (uniform(keys, stream) < probability).tolist()
            flips = [(*before, dimension) if flip else before for before, flip in zip(flips, flipped, strict=True)]
    return flips


def crop_boxes(
    keys: Tensor, heights: Tensor, widths: Tensor, scale: tuple[float, float], ratio: tuple[float, float]
) -> Tensor:
    """Boxes of torchvision's RandomResizedCrop (Szegedy et al., 2015, https://arxiv.org/abs/1409.4842), each drawn from
    its image's key.

    `heights`, `widths`: int64 [b], of the images. `scale`: bounds of the share of the area; `ratio`: of width / height.
    Returns int64 [b, 4]: top, left, height, width. The result is the first of ten boxes that is inside the image, or
    else the largest central box whose ratio is within the bounds.
    """
    streams = [Stream.RESIZED + number for number in range(2 * TRIES)]
    draws = uniforms(keys, [Stream.RESIZED_TOP, Stream.RESIZED_LEFT, *streams]).double()
    areas = (scale[0] + draws[2::2] * (scale[1] - scale[0])) * (heights * widths)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    ratios = torch.exp(low + draws[3::2] * (high - low))
    tried_h, tried_w = torch.sqrt(areas / ratios).round().long(), torch.sqrt(areas * ratios).round().long()
    inside = (tried_h > 0) & (tried_h <= heights) & (tried_w > 0) & (tried_w <= widths)
    first = inside.to(torch.uint8).argmax(0)[None]  # of equal values, argmax returns the first index

    own = widths / heights
    fallback_h = torch.where(own < ratio[0], (widths / ratio[0]).round().long(), heights)
    fallback_w = torch.where(own > ratio[1], (heights * ratio[1]).round().long(), widths)
    any_inside = inside.any(0)
    height = torch.where(any_inside, tried_h.gather(0, first)[0], torch.minimum(fallback_h, heights))
    width = torch.where(any_inside, tried_w.gather(0, first)[0], torch.minimum(fallback_w, widths))
    top = torch.where(any_inside, (draws[0] * (heights - height + 1)).long(), (heights - height) // 2)
    left = torch.where(any_inside, (draws[1] * (widths - width + 1)).long(), (widths - width) // 2)
    return torch.stack([top, left, height, width], 1)


def _size(image: Tensor | LazyImage) -> tuple[int, int]:
    return (image.shape[1], image.shape[2]) if isinstance(image, Tensor) else (image.height, image.width)


def sides(height: int, width: int, short_side: int) -> tuple[int, int]:
    """Height and width of an image resized to this short side, rounded as in torchvision's Resize."""
    short = min(height, width)
    return int(short_side * height / short), int(short_side * width / short)


def resized_to_short_side(image: Tensor, short_side: int, interpolation: str = "bilinear") -> Tensor:
    """`image`, uint8 [C, H, W], resized so that the shorter of its sides has `short_side` pixels.

    The pixels are those of torchvision's Resize in 0.29. Older versions of it computed in float32 on some CPUs, so that
    pixels differed by 1.
    """
    height, width = sides(image.shape[1], image.shape[2], short_side)
    return image if image.shape[1:] == (height, width) else resized(image, height, width, interpolation)


def resized(image: Tensor, height: int, width: int, interpolation: str = "bilinear") -> Tensor:
    """`image`, uint8 [C, H, W] on the CPU, resized to uint8 [C, height, width] with antialiasing."""
    # image[None] would not count as channels last, and interpolate would copy the pixels twice.
    batch = image.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
    return F.interpolate(batch, (height, width), mode=interpolation, antialias=True)[0]
