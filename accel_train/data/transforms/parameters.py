"""Random augmentation parameters of each sample, drawn on the host: where to crop, erase and mix, and how much.

Each sample has its own parameters, drawn from its own key (see keyed.py): a pure function of (seed, epoch, sample).
The loaders know the keys before the device does; they draw for many batches at once and send one small tensor. On a
GPU the same numbers would take about 200 kernels of a few microseconds each in every update.
"""

from __future__ import annotations

import math
from enum import IntEnum, auto

import torch
from torch import Tensor

from accel_train.config.schema import Augment
from accel_train.keyed import uniforms


class Stream(IntEnum):
    """Number of each draw in a sample's sequence. They stay as they are: others would change the augmentation."""

    TOP = auto()
    LEFT = auto()
    FLIP = auto()
    ERASE = auto()
    ERASE_AREA = auto()
    ERASE_RATIO = auto()
    ERASE_TOP = auto()
    ERASE_LEFT = auto()
    MIX = auto()
    MIX_KIND = auto()
    MIX_SHARE = auto()
    MIX_TOP = auto()
    MIX_LEFT = auto()
    RESIZED_TOP = auto()
    RESIZED_LEFT = auto()
    VERTICAL_FLIP = auto()
    INTERPOLATION = 21
    ERASE_NOISE = 23
    RESIZED = 1000  # and following: area and ratio of each try


class Column(IntEnum):
    """The column of each parameter in a sample's row. All are int32, so that one copy sends them all to the device."""

    TOP = 0  # of the crop; plus the number of possible windows if the image is flipped vertically
    LEFT = 1  # of the crop; plus the number of possible windows if the image is flipped horizontally
    FIRST = 2  # 4 columns: first row and column of the erased box, then of the pasted box
    LAST = 6  # 4 columns: last row and column, which are inside the box; -1 if the box is empty
    CUT = 10  # 1 for CutMix, 0 for mixup
    SHARE = 11  # of the sample itself in the mixture: the bits of a float32
    REST = 12  # 1 - share, the neighbour's: the bits of a float32


COLUMNS = Column.REST + 1


class AugmentParameters:
    """Draws the parameters that `BatchTransform` needs for each training sample. All its tensors are on the CPU."""

    def __init__(self, augment: Augment, size: int, *, per_image: bool, virtual_batch: int = 2) -> None:
        """`size`: of the model's input, in pixels; `per_image`: workers have already cropped and flipped the images;
        `virtual_batch`: samples that are always computed together, in the order's places."""
        self.augment, self.size = augment, size
        self.crops = augment.crop == "random" and not per_image
        self.flips = (augment.flip > 0 or augment.vertical_flip > 0) and not per_image
        self.mixing = None
        if augment.mixes:
            self.mixing = Mixing(augment, size, virtual_batch)
        self.pad = augment.pad if self.crops else 0
        self.reflects = augment.pad_mode == "reflect"  # what is padded is the reflected image; else it is black
        self.windows = (augment.resize or size) + 2 * self.pad - size + 1  # possible positions in each direction

    @property
    def any(self) -> bool:
        """Whether the augmentation has any random part."""
        return self.crops or self.flips or self.mixing is not None or self.augment.erase > 0

    def __call__(self, keys: Tensor, weights: Tensor) -> Tensor:
        """The parameters, int32 [b, columns], of samples with these keys (int64 [b]) and weights (float32 [b]).

        All on the CPU. With mixing, the samples are whole pairs of neighbours, or (`mix_mode` batch) virtual batches.
        """
        parameters = torch.zeros((len(keys), COLUMNS), dtype=torch.int32)
        if self.crops or self.flips:
            self._draw_windows(parameters, keys)
        if self.augment.erase:
            self._draw_erased(parameters, keys)
        if self.mixing is not None:
            self.mixing(parameters, keys, weights)
        return parameters

    def _draw_windows(self, parameters: Tensor, keys: Tensor) -> None:
        """Crops and flips."""
        draws = uniforms(keys, (Stream.VERTICAL_FLIP, Stream.FLIP, Stream.TOP, Stream.LEFT))
        if self.crops:
            corners = (draws[2:] * self.windows).int()
        else:
            corners = torch.full((2, len(keys)), (self.windows - 1) // 2, dtype=torch.int32)
        if self.flips:
            for axis, probability in enumerate((self.augment.vertical_flip, self.augment.flip)):
                corners[axis].add_(draws[axis] < probability, alpha=self.windows)
        parameters[:, Column.TOP : Column.LEFT + 1] = corners.T

    def _draw_erased(self, parameters: Tensor, keys: Tensor) -> None:
        """Random erasing (Zhong et al., 2020, https://arxiv.org/abs/1708.04896)."""
        streams = (Stream.ERASE, Stream.ERASE_AREA, Stream.ERASE_RATIO, Stream.ERASE_TOP, Stream.ERASE_LEFT)
        draws = uniforms(keys, streams)
        erased = draws[0] < self.augment.erase
        area = 0.02 + draws[1] * (0.33 - 0.02)
        ratio = torch.exp((draws[2] * 2 - 1) * math.log(1 / 0.3))
        height = (torch.sqrt(area * ratio) * self.size).round().clamp(1, self.size)
        width = (torch.sqrt(area / ratio) * self.size).round().clamp(1, self.size)
        top = (draws[3] * (self.size - height + 1)).floor()
        left = (draws[4] * (self.size - width + 1)).floor()
        for axis, (first, length) in enumerate(((top, height), (left, width))):
            parameters[:, Column.FIRST + axis] = first.int()
            parameters[:, Column.LAST + axis] = torch.where(erased, first + length - 1, -1).int()


def transforms_each_image(one_size: bool, augment: Augment, *, training: bool) -> bool:
    """Whether images must be transformed one by one (transforms/image.py) before they form a batch.

    `one_size`: whether the source has them as tensors of one size.
    """
    return not one_size or (training and augment.each_image)


def crop_fraction(size: int, short_side: int) -> float:
    """The shortest augment.crop_fraction with which a crop of `size` pixels is from images with this short side."""
    for digits in range(2, 16):
        fraction = round(size / short_side, digits)
        if fraction > 0 and math.floor(size / fraction) == short_side:
            return fraction
    return math.nextafter(size / short_side, 0)


def resize_default(size: int) -> int:
    """The short side before cropping an input of `size` pixels: 256 for 224, as is usual for ImageNet."""
    return round(size / 0.875)


def over_pixels(values: Tensor) -> Tensor:
    """One value for each image of a batch [b, C, H, W], from `values` [b]."""
    return values[:, None, None, None]


def box_masks(parameters: Tensor, first: int, last: int, steps: Tensor, count: int = 1) -> Tensor:
    """Masks, bool [b, count, size, size], of boxes whose first rows and columns are in the columns `first` and after
    it, two of each box, and whose last ones in `last`. `steps`: int32 [size], from 0 on."""
    low, high = (parameters[:, column : column + 2 * count, None] for column in (first, last))
    inside = steps.clamp(low, high) == steps  # [b, 2 count, size]; an empty box ends at -1, which no step equals
    return inside[:, 0::2, :, None] & inside[:, 1::2, None, :]


# The random parameters of Mixup and CutMix: which samples are mixed, how, and with which share.
#
# Mixup: Zhang et al., 2018, https://arxiv.org/abs/1710.09412; CutMix: Yun et al., 2019,
# https://arxiv.org/abs/1905.04899. The choices are those of timm's Mixup (mode, switching); its "batch" is the virtual
# batch here, which is the same on any number of processes. A sample's partner is its neighbour, not the sample at the
# other end of a batch.


SWITCH_PROBABILITY = 0.5  # of CutMix, not mixup, if both are on: timm's default
DRAWS = (Stream.MIX, Stream.MIX_KIND, Stream.MIX_SHARE, Stream.MIX_TOP, Stream.MIX_LEFT)
"""Of a group: whether to mix, which of the two, the share, and the place of the box."""


class Mixing:
    """Draws how samples are mixed."""

    def __init__(self, augment: Augment, size: int, virtual_batch: int) -> None:
        """`size`: of the model's input, in pixels; `virtual_batch`: samples that are always computed together."""
        self.augment, self.size = augment, size
        self.group = {"batch": virtual_batch, "pair": 2, "elem": 1}[augment.mix_mode]
        """Samples that share the numbers which are drawn."""
        self.cuts = augment.cuts
        # Tables to convert a uniform number to Beta(alpha, alpha), because torch cannot sample it from a key.
        self.mixup_quantiles = beta_quantiles(augment.mixup)
        self.cutmix_quantiles = beta_quantiles(augment.cutmix)

    def __call__(self, parameters: Tensor, keys: Tensor, weights: Tensor) -> None:
        """Fill the columns of `parameters`, int32 [b, columns]. `keys`: int64 [b], of which the first one of each group
        is that of all its samples; `weights`: float32 [b], 0 for padding."""
        draws = uniforms(keys[:: self.group], DRAWS)
        both = self.augment.mixup > 0 and self.cuts
        cuts = (draws[1] < SWITCH_PROBABILITY) if both else torch.full_like(draws[1], self.cuts).bool()
        cutmix_share, mixup_share = (
            _interpolate(quantiles, draws[2]) for quantiles in (self.cutmix_quantiles, self.mixup_quantiles)
        )
        share = torch.where(cuts, cutmix_share, mixup_share)
        rows, columns = self._sides(draws, share)
        area = (rows[1] - rows[0]) * (columns[1] - columns[0])
        share = torch.where(cuts, 1 - area / self.size**2, share)
        mixed = draws[0] < self.augment.mix_probability

        def of_samples(values: Tensor) -> Tensor:
            return values.repeat_interleave(self.group)

        # The neighbour of an epoch's last sample may be padding: then the sample is not mixed.
        pairs = weights.view(-1, 2)
        real = ((pairs[:, 0] > 0) & (pairs[:, 1] > 0)).repeat_interleave(2)
        mixed = of_samples(mixed) & real
        share = torch.where(mixed, of_samples(share), 1.0)
        parameters[:, Column.CUT] = of_samples(cuts).int()
        parameters[:, Column.SHARE] = share.view(torch.int32)
        parameters[:, Column.REST] = (1 - share).view(torch.int32)
        for axis, (first, end) in enumerate((rows, columns)):
            last = torch.where(mixed & of_samples(end > first), of_samples(end - 1), -1)
            parameters[:, Column.FIRST + 2 + axis] = of_samples(first).int()
            parameters[:, Column.LAST + 2 + axis] = last.int()

    def _sides(self, draws: Tensor, share: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The first row and the one after the last, and so the columns, of a box of the image's shape around a random
        pixel, clipped at the image's edge. The side is rounded down, as in timm's rand_bbox and the paper's own code
        (the paper itself does not round): the recipes with CutMix come from there."""
        side = (torch.sqrt(1 - share) * self.size).floor()
        firsts = [(draws[3 + axis] * self.size).floor() - (side / 2).floor() for axis in (0, 1)]
        return [(first.clamp(0, self.size), (first + side).clamp(0, self.size)) for first in firsts]


def beta_quantiles(alpha: float, count: int = 4097) -> Tensor:
    """Quantiles of Beta(alpha, alpha) at `count` evenly spaced probabilities from 0 to 1; float32 [count].

    alpha = 0 means "no mixing": all ones.
    """
    if alpha == 0:
        return torch.ones(count)
    from scipy.special import betaincinv  # scikit-learn depends on scipy

    return torch.from_numpy(betaincinv(alpha, alpha, torch.linspace(0, 1, count, dtype=torch.float64).numpy())).float()


def _interpolate(quantiles: Tensor, probabilities: Tensor) -> Tensor:
    """The quantiles at `probabilities` (in [0, 1)), by linear interpolation in the table."""
    positions = probabilities * (len(quantiles) - 1)
    below = positions.long()
    return torch.lerp(quantiles[below], quantiles[below + 1], positions - below)
