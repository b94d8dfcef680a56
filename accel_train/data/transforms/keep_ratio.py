"""timm's training crops rkrc and rkrr: the whole image, resized in proportion or nearly so, then its centre or a random
window of it. Written after ResizeKeepRatio, CenterCropOrPad and RandomCropOrPad in timm/data/transforms.py, with the
settings of transforms_imagenet_train; timm draws from Python's generator, and here each image draws from its key."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from accel_train.config.schema import Augment
from accel_train.data.transforms.parameters import Stream
from accel_train.keyed import uniforms

PROBABILITY = 0.5
"""Of a random scale, and of a random ratio."""
STREAMS = (
    Stream.KEPT_SCALED, Stream.KEPT_SCALE, Stream.KEPT_STRETCHED, Stream.KEPT_STRETCH, Stream.RESIZED_TOP,
    Stream.RESIZED_LEFT,
)  # fmt: skip


def drawn_windows(sizes: Sequence[tuple[int, int]], keys: Tensor, augment: Augment, size: int) -> list[list[int]]:
    """What becomes of images of these heights and widths, drawn from their keys (int64 [b]): the height and width to
    which each is resized, and the top left corner of its window. Where that is outside, the image is mirrored.

    `augment.scale`: bounds of the share of the area that is seen; `augment.ratio`: of the change of width / height.
    `size`: height and width of the window.
    """
    draws = uniforms(keys, STREAMS).double().T.tolist()
    return [_window(height, width, draw, augment, size) for (height, width), draw in zip(sizes, draws, strict=True)]


def _window(height: int, width: int, draws: list[float], augment: Augment, size: int) -> list[int]:
    scaled, scale, stretched, stretch, *places = draws
    ratio = min(height / size, width / size)
    factors = [1.0, 1.0]
    if scaled < PROBABILITY:
        least, most = augment.scale
        factors = [1.0 / math.sqrt(least + (most - least) * scale)] * 2
    if stretched < PROBABILITY:
        low, high = (math.log(bound) for bound in augment.ratio)
        factor = math.sqrt(math.exp(low + (high - low) * stretch))
        factors = [factors[0] / factor, factors[1] * factor]
    high_and_wide = [max(round(x * f / ratio), 1) for x, f in zip((height, width), factors, strict=True)]
    corner = []
    for side, place in zip(high_and_wide, places, strict=True):
        more = side - size
        if augment.crop == "rkrr":
            moved = int(place * (abs(more) + 1))
            corner.append(moved if more > 0 else -moved)
        else:
            corner.append(round(more / 2) if more > 0 else -(-more // 2))
    return [*high_and_wide, *corner]


def cut(image: Tensor, top: int, left: int, size: int) -> Tensor:
    """The window of `image` [C, H, W] at this corner, [C, size, size]. Outside, the image is mirrored at its edges."""
    rows, columns = (_mirrored(first, side, size) for first, side in zip((top, left), image.shape[1:], strict=True))
    return image.index_select(1, rows).index_select(2, columns)


def _mirrored(first: int, side: int, size: int) -> Tensor:
    """The indices of `size` rows from `first` on in an image that has `side` of them; the edge is not repeated."""
    period = max(2 * (side - 1), 1)
    places = torch.arange(first, first + size).remainder(period)
    return torch.minimum(places, period - places)
