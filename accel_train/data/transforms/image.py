"""Transforms of one image at a time, in the worker processes: crop, resize, what policies.py and own.py do, flip.

Input and output are uint8, a quarter of float32's bytes. Transforms that work on a whole batch (normalisation, erasing,
mixing) run later on the device (batch.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torchvision.transforms import v2

from accel_train.config.schema import Augment
from accel_train.data.sources.files.images import Box, LazyImage
from accel_train.data.sources.user.dataset import restored_generators, seed_generators
from accel_train.data.transforms.parameters import Stream, resize_default
from accel_train.data.transforms.policies import image_steps
from accel_train.data.transforms.resizing import resized, sides
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
        self.crop = augment.crop if training else "center"
        self.short_side = augment.resize or resize_default(size)
        self.interpolation = augment.interpolation_of(training=training)
        # The decoder takes means of pixels, and nearest takes one of them.
        self.decodes_smaller = training and decodes_smaller and self.interpolation != "nearest"
        crops: list[torch.nn.Module] = []
        if self.crop == "random":
            padding = {"padding": augment.pad or None, "padding_mode": augment.pad_mode}
            crops.append(v2.RandomCrop(size, pad_if_needed=True, **padding))
        elif self.crop == "center":
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

    def __call__(self, images: Sequence[Tensor | LazyImage], keys: Tensor) -> Tensor:
        """`images`: each uint8 [C, H, W] or not yet decoded; `keys`: int64 [b]. Returns uint8 [b, C, size, size]."""
        modes = self._modes(keys)
        decoded = self._resized(images, modes, keys)
        flips = drawn_flips(keys, self.augment, training=self.training)
        batch: Tensor | None = None
        # What policies and the user's own transform draw from, all processes and workers seed with each image's key.
        with restored_generators() if self.is_random else contextlib.nullcontext():
            for index, (image, mode, word) in enumerate(zip(decoded, modes, keys.tolist(), strict=True)):
                if self.is_random:
                    seed_generators(word)
                image = self.steps[mode](image)
                if batch is None:
                    batch = image.new_empty((len(images), self.size, self.size, len(image)))
                batch[index] = (image.flip(flips[index]) if flips[index] else image).permute(1, 2, 0)
        assert batch is not None
        return batch.permute(0, 3, 1, 2)

    def _resized(self, images: Sequence[Tensor | LazyImage], modes: Sequence[str], keys: Tensor) -> Iterator[Tensor]:
        """Yield each image, resized and, unless that is one of `steps`, cropped."""
        sizes = [_size(image) for image in images]
        if self.crop == "resized":
            heights, widths = torch.tensor(sizes).T
            boxes = crop_boxes(keys, heights, widths, self.augment.scale, self.augment.ratio).tolist()
            for image, mode, box in zip(images, modes, boxes, strict=True):
                yield self._resized_box(image, mode, box, self.size, self.size)
        else:
            for image, mode, (height, width) in zip(images, modes, sizes, strict=True):
                squashed = self.crop == "squash"
                target = (self.size, self.size) if squashed else sides(height, width, self.short_side)
                yield self._resized_box(image, mode, None, *target)

    def _modes(self, keys: Tensor) -> Sequence[str]:
        """How each image is resized."""
        if self.interpolation != "random":
            return (self.interpolation,) * len(keys)
        return ["bicubic" if drawn else "bilinear" for drawn in (uniform(keys, Stream.INTERPOLATION) >= 0.5).tolist()]

    def _resized_box(self, image: Tensor | LazyImage, mode: str, box: Box | None, height: int, width: int) -> Tensor:
        """The box of the image (None: all of it), resized to this height and width. It is cropped first, so that only
        its pixels are resized."""
        top, left, high, wide = box or (0, 0, *_size(image))
        if isinstance(image, LazyImage):
            reduction = self._reduction(image, *min((high, height), (wide, width), key=lambda pair: pair[0] / pair[1]))
            if reduction > 1:
                return image.reduced((top, left, high, wide), height, width, reduction, mode)
            image = image.pixels()
        return resized(image[:, top : top + high, left : left + wide], height, width, mode)

    def _reduction(self, image: LazyImage, side: int, needed: int) -> int:
        """The largest JPEG scale factor at which `side` pixels of the image still give `needed` pixels."""
        if not (self.decodes_smaller and image.reducible):
            return 1
        return max(factor for factor in (1, 2, 4, 8) if factor == 1 or side >= factor * needed)


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
