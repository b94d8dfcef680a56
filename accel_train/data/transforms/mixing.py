"""The random parameters of Mixup and CutMix: which samples are mixed, how, and with which share.

Mixup: Zhang et al., 2018, https://arxiv.org/abs/1710.09412; CutMix: Yun et al., 2019, https://arxiv.org/abs/1905.04899.
The choices are those of timm's Mixup (mode, switching); its "batch" is the virtual batch here, which
is the same on any number of processes. A sample's partner is its neighbour, not the sample at the other end of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accel_train.config.schema import Augment

SWITCH_PROBABILITY = 0.5  # of CutMix, not mixup, if both are on: timm's default
DRAWS = 5  # of a group: whether to mix, which of the two, the share, and the place of the box


@dataclass(frozen=True)
class Mixed:
    """What `Mixing` returns, of each sample: tensors [b], on the CPU."""

    share: Tensor  # float32: of the sample itself in the mixture; 1 if it is not mixed
    cuts: Tensor  # bool: CutMix, not mixup
    boxes: tuple[tuple[Tensor, Tensor], ...]
    """Of rows, and of columns: the first and the last one of the pasted box, int32; the last is -1 if it is empty."""


class Mixing:
    """Computes from uniform numbers how samples are mixed."""

    def __init__(self, augment: Augment, size: int, virtual_batch: int) -> None:
        """`size`: of the model's input, in pixels; `virtual_batch`: samples that are always computed together."""
        self.augment, self.size = augment, size
        self.group = {"batch": virtual_batch, "pair": 2, "elem": 1}[augment.mix_mode]
        """Samples that share the numbers which are drawn."""
        self.cuts = augment.cuts
        # Tables to convert a uniform number to Beta(alpha, alpha), because torch cannot sample it from a key.
        self.mixup_quantiles = beta_quantiles(augment.mixup)
        self.cutmix_quantiles = beta_quantiles(augment.cutmix)

    def __call__(self, draws: Tensor, weights: Tensor) -> Mixed:
        """`draws`: float32 [DRAWS, groups], in [0, 1); `weights`: float32 [b], 0 for padding."""
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
        return Mixed(
            share=torch.where(mixed, of_samples(share), 1.0),
            cuts=of_samples(cuts),
            boxes=tuple(
                (of_samples(first).int(), torch.where(mixed & of_samples(end > first), of_samples(end - 1), -1).int())
                for first, end in (rows, columns)
            ),
        )

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
