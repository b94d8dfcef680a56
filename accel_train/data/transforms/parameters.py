"""What is random about each sample of a batch, drawn on the host: where it is cropped, erased and mixed, and how much.

Each sample has its own parameters, drawn from its own key (see keyed.py): a pure function of (seed, epoch, sample).
The loaders know the keys before the device does, draw for many batches at once, and send one small tensor: drawn on a
GPU, the same numbers would take some two hundred kernels an update, each of them a few microseconds.
"""

from __future__ import annotations

import math
from enum import IntEnum, auto

import torch
from torch import Tensor

from accel_train.config.schema import Augment
from accel_train.data.order.keyed import uniforms


class Stream(IntEnum):
    """Number of each draw within a sample's sequence. Append only: an order changed is another augmentation."""

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
    RESIZED = 1000  # and on: area and ratio of each try


class Column(IntEnum):
    """Where a parameter is in a sample's row. All are int32, so that one copy brings all of them to the device."""

    TOP = 0  # of the crop
    LEFT = 1  # of the crop; plus the number of possible ones if the image is mirrored
    FIRST = 2  # 4 columns: first row and column of the box that is erased, then of the box that is pasted
    LAST = 6  # 4 columns: the last ones, which belong to the box; -1 if it is empty
    CUT = 10  # 1 for CutMix, 0 for mixup
    SHARE = 11  # of the sample itself in what is mixed: the bits of a float32
    REST = 12  # 1 - share, the neighbour's: the bits of a float32


COLUMNS = Column.REST + 1


class AugmentParameters:
    """Draws what `BatchTransform` needs to know of each sample in training. It holds CPU tensors only."""

    def __init__(self, augment: Augment, size: int, *, per_image: bool) -> None:
        """`size`: of the model's input, in pixels; `per_image`: images were cropped and flipped before."""
        self.augment, self.size = augment, size
        self.crops = augment.crop == "random" and not per_image
        self.flips = augment.flip > 0 and not per_image
        self.mixes = augment.mixup > 0 or augment.cutmix > 0
        self.pad = augment.pad if self.crops else 0
        self.places = (augment.resize or size) + 2 * self.pad - size + 1  # of a window, in each direction
        # Quantiles of Beta(alpha, alpha): a uniform number is looked up in them, for torch cannot draw one from a key.
        self.mixup_quantiles = beta_quantiles(augment.mixup)
        self.cutmix_quantiles = beta_quantiles(augment.cutmix)

    @property
    def any(self) -> bool:
        """Whether anything is random at all."""
        return self.crops or self.flips or self.mixes or self.augment.erase > 0

    def __call__(self, keys: Tensor, weights: Tensor) -> Tensor:
        """The parameters of samples with these keys (int64 [b]) and weights (float32 [b]), on the CPU; int32
        [b, columns]. With mixing `b` is even, and samples 2k and 2k+1 are neighbours in their update."""
        drawn = torch.zeros((len(keys), COLUMNS), dtype=torch.int32)
        if self.crops or self.flips:
            self._draw_windows(drawn, keys)
        if self.augment.erase:
            self._draw_erased(drawn, keys)
        if self.mixes:
            self._draw_mixed(drawn.view(-1, 2, drawn.shape[1]), keys[::2], weights.view(-1, 2))
        return drawn

    def _draw_windows(self, drawn: Tensor, keys: Tensor) -> None:
        draws = uniforms(keys, (Stream.FLIP, Stream.TOP, Stream.LEFT))
        if self.crops:
            corners = (draws[1:] * self.places).int()
        else:
            corners = torch.full((2, len(keys)), (self.places - 1) // 2, dtype=torch.int32)
        if self.flips:
            corners[1].add_(draws[0] < self.augment.flip, alpha=self.places)
        drawn[:, Column.TOP : Column.LEFT + 1] = corners.T

    def _draw_erased(self, drawn: Tensor, keys: Tensor) -> None:
        """Random erasing (Zhong et al., 2020, https://arxiv.org/abs/1708.04896)."""
        streams = (Stream.ERASE, Stream.ERASE_AREA, Stream.ERASE_RATIO, Stream.ERASE_TOP, Stream.ERASE_LEFT)
        draws = uniforms(keys, streams)
        area = 0.02 + draws[1] * (0.33 - 0.02)
        ratio = torch.exp((draws[2] * 2 - 1) * math.log(1 / 0.3))
        height = (torch.sqrt(area * ratio) * self.size).round().clamp(1, self.size)
        width = (torch.sqrt(area / ratio) * self.size).round().clamp(1, self.size)
        top = (draws[3] * (self.size - height + 1)).floor()
        left = (draws[4] * (self.size - width + 1)).floor()
        some = draws[0] < self.augment.erase
        for at, (first, length) in enumerate(((top, height), (left, width))):
            drawn[:, Column.FIRST + at] = first.int()
            drawn[:, Column.LAST + at] = torch.where(some, first + length - 1, -1).int()

    def _draw_mixed(self, drawn: Tensor, keys: Tensor, weights: Tensor) -> None:
        """Mixup (Zhang et al., 2018, https://arxiv.org/abs/1710.09412) and CutMix (Yun et al., 2019,
        https://arxiv.org/abs/1905.04899) of neighbours: `drawn` [pairs, 2, columns], `weights` [pairs, 2], and the
        `keys` [pairs] of the first ones, which both of a pair use."""
        streams = (Stream.MIX, Stream.MIX_KIND, Stream.MIX_SHARE, Stream.MIX_TOP, Stream.MIX_LEFT)
        draws = uniforms(keys, streams)
        # The last sample of an epoch may have padding for a neighbour: it stays as it is.
        mixed = (draws[0] < self.augment.mix_probability) & (weights[:, 0] > 0) & (weights[:, 1] > 0)
        both = self.augment.mixup > 0 and self.augment.cutmix > 0
        cuts = (draws[1] < 0.5) if both else torch.full_like(mixed, self.augment.cutmix > 0)
        of_cut, of_blend = (_looked_up(each, draws[2]) for each in (self.cutmix_quantiles, self.mixup_quantiles))
        share = torch.where(mixed, torch.where(cuts, of_cut, of_blend), 1.0)

        # CutMix: a box of the image's own shape around a random middle; what hangs over the edge is cut off, and
        # the share is counted from what is left.
        side = torch.sqrt(1 - share) * self.size
        area = torch.ones_like(share)
        for at in (0, 1):
            first = (draws[3 + at] * self.size - side / 2).round()
            end = (first + side.round()).clamp(0, self.size)
            first = first.clamp(0, self.size)
            area = area * (end - first)
            drawn[:, :, Column.FIRST + 2 + at] = first.int()[:, None]
            drawn[:, :, Column.LAST + 2 + at] = torch.where(end > first, end - 1, -1).int()[:, None]
        share = torch.where(cuts, 1 - area / self.size**2, share)
        drawn[:, :, Column.CUT] = cuts.int()[:, None]
        drawn[:, :, Column.SHARE] = share.view(torch.int32)[:, None]
        drawn[:, :, Column.REST] = (1 - share).view(torch.int32)[:, None]


def beta_quantiles(alpha: float, count: int = 4097) -> Tensor:
    """Quantiles of Beta(alpha, alpha) at `count` evenly spaced probabilities from 0 to 1; float32 [count].

    alpha = 0 stands for "no mixing": all ones.
    """
    if alpha == 0:
        return torch.ones(count)
    from scipy.special import betaincinv  # scikit-learn brings scipy along

    return torch.from_numpy(betaincinv(alpha, alpha, torch.linspace(0, 1, count, dtype=torch.float64).numpy())).float()


def _looked_up(quantiles: Tensor, draw: Tensor) -> Tensor:
    at = draw * (len(quantiles) - 1)
    below = at.long()
    return torch.lerp(quantiles[below], quantiles[below + 1], at - below)
