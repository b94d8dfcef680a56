"""What is done to a whole batch at once, on the device: resize, crop, flip, normalise, erase, mix.

Each sample has its own parameters, drawn from its own key (see keyed.py): a pure function of (seed, epoch, sample),
whichever process, accumulation step or restart computes it. torchvision's transforms would give all samples of a
batch the same crop and the same flip.

Mixup and cutmix mix neighbours, the samples at positions 2k and 2k+1 of an update's window. The order is random, so
are the pairs, and a slice of even size holds both of each, whatever the number of processes and of accumulation steps.
"""

from __future__ import annotations

import math
from enum import IntEnum, auto

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train.config.schema import Augment
from accel_train.data.order.keyed import uniform, uniforms


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


class BatchTransform:
    """Turns a batch of uint8 images into the model's input, and labels into targets."""

    def __init__(
        self,
        augment: Augment,
        *,
        size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        num_classes: int,
        training: bool,
        per_image: bool,
        device: torch.device,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        """`mean` and `std`: of each channel, in 0..1. `size` (height and width, in pixels) and `memory_format`: of the
        model's input. `per_image`: transform.py has resized, cropped and flipped already."""
        self.augment = augment
        self.size = size
        self.num_classes = num_classes
        self.training = training
        self.per_image = per_image
        self.memory_format = memory_format
        # A pixel becomes pixel / scale + shift. Both lie in the input's layout, so that the arithmetic runs along its
        # memory: [C, 1, 1], or a row of it, [size, C].
        means, stds = torch.tensor(mean, device=device), torch.tensor(std, device=device)
        self.scale, self.shift = (
            values.view(-1, 1, 1) if memory_format == torch.contiguous_format else values.repeat(size, 1)
            for values in (stds * 255, -means / stds)
        )
        # Quantiles of Beta(alpha, alpha): a uniform number is looked up in them, for torch cannot draw one from a key.
        self.mixup_quantiles = beta_quantiles(augment.mixup).to(device)
        self.cutmix_quantiles = beta_quantiles(augment.cutmix).to(device)

    @property
    def mixes(self) -> bool:
        return self.training and (self.augment.mixup > 0 or self.augment.cutmix > 0)

    def __call__(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """`batch`: images uint8 [b, C, H, W], labels int64 [b], keys int64 [b], weights float32 [b].

        Returns the input, float32 [b, C, size, size] in `memory_format`, and the targets: labels int64 [b] or,
        mixed, shares float32 [b, classes].
        """
        images, labels, keys = batch["images"], batch["labels"], batch["keys"]
        resize = self.augment.resize or self.size
        if not self.per_image and images.shape[-1] != resize:
            images = F.interpolate(images.float(), (resize, resize), mode="bilinear", antialias=True)
        images = self._crop_and_flip(images, keys)
        images = self._normalise(images)
        if not self.training:
            return images, labels
        if self.augment.erase:
            images = self._erase(images, keys)
        if self.mixes:
            return self._mix(images, labels, keys, batch["weights"])
        return images, labels

    def _crop_and_flip(self, images: Tensor, keys: Tensor) -> Tensor:
        """One window of size x size of each image, at random or in the middle, by chance mirrored."""
        random = self.training and self.augment.crop == "random" and not self.per_image
        flips = self.training and self.augment.flip > 0 and not self.per_image
        pad, size = self.augment.pad if random else 0, self.size
        height, width = images.shape[2] + 2 * pad, images.shape[3] + 2 * pad
        top, left = (height - size) // 2, (width - size) // 2
        if not random and not flips:
            return images[:, :, top : top + size, left : left + size]

        draws = uniforms(keys, (Stream.FLIP, Stream.TOP, Stream.LEFT))
        if random:
            tops, lefts = (draws[1] * (height - size + 1)).long(), (draws[2] * (width - size + 1)).long()
        else:
            tops, lefts = torch.full_like(keys, top), torch.full_like(keys, left)
        mirrored = draws[0] < (self.augment.flip if flips else 0)
        return _windows(images, pad, tops, lefts, mirrored, size, reflects=self.augment.pad_mode == "reflect")

    def _normalise(self, images: Tensor) -> Tensor:
        images = images.to(torch.float32, memory_format=self.memory_format, copy=True)
        rows = images if self.memory_format == torch.contiguous_format else images.permute(0, 2, 3, 1)
        # A quotient and a sum, each rounded on every device: a product before the sum might not be.
        torch.addcdiv(self.shift, rows, self.scale, out=rows)
        return images

    def _erase(self, images: Tensor, keys: Tensor) -> Tensor:
        """Random erasing (Zhong et al., 2020, https://arxiv.org/abs/1708.04896), in the mean's colour."""
        area = 0.02 + uniform(keys, Stream.ERASE_AREA) * (0.33 - 0.02)
        ratio = torch.exp((uniform(keys, Stream.ERASE_RATIO) * 2 - 1) * math.log(1 / 0.3))
        height = (torch.sqrt(area * ratio) * self.size).round().clamp(1, self.size)
        width = (torch.sqrt(area / ratio) * self.size).round().clamp(1, self.size)
        top = (uniform(keys, Stream.ERASE_TOP) * (self.size - height + 1)).floor()
        left = (uniform(keys, Stream.ERASE_LEFT) * (self.size - width + 1)).floor()
        erased = self._box(top, left, height, width)
        erased &= (uniform(keys, Stream.ERASE) < self.augment.erase)[:, None, None, None]
        return images.masked_fill_(erased, 0.0)

    def _mix(self, images: Tensor, labels: Tensor, keys: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Mixup (Zhang et al., 2018, https://arxiv.org/abs/1710.09412) and CutMix (Yun et al., 2019,
        https://arxiv.org/abs/1905.04899) of neighbours. Both of a pair use the first one's key."""
        pair = torch.arange(len(keys), device=keys.device) // 2 * 2
        keys, partner = keys[pair], _swapped(images).contiguous(memory_format=self.memory_format)
        # The last sample of an epoch may have padding for a neighbour: it stays as it is.
        mixed = (uniform(keys, Stream.MIX) < self.augment.mix_probability) & (_swapped(weights) > 0) & (weights > 0)
        both = self.augment.mixup > 0 and self.augment.cutmix > 0
        cuts = (uniform(keys, Stream.MIX_KIND) < 0.5) if both else torch.full_like(mixed, self.augment.cutmix > 0)
        draw = uniform(keys, Stream.MIX_SHARE)
        share = torch.where(cuts, _looked_up(self.cutmix_quantiles, draw), _looked_up(self.mixup_quantiles, draw))
        share = torch.where(mixed, share, 1.0)

        # CutMix: a box of the image's own shape around a random middle; what hangs over the edge is cut off, and
        # the share is counted from what is left.
        side = torch.sqrt(1 - share) * self.size
        top = (uniform(keys, Stream.MIX_TOP) * self.size - side / 2).round()
        left = (uniform(keys, Stream.MIX_LEFT) * self.size - side / 2).round()
        bottom, right = (top + side.round()).clamp(0, self.size), (left + side.round()).clamp(0, self.size)
        top, left = top.clamp(0, self.size), left.clamp(0, self.size)
        pasted = self._box(top, left, bottom - top, right - left)
        share = torch.where(cuts, 1 - (bottom - top) * (right - left) / self.size**2, share)

        blended = images * _per_image(share) + partner * _per_image(1 - share)
        images = torch.where(_per_image(cuts), torch.where(pasted, partner, images), blended)
        images = images.contiguous(memory_format=self.memory_format)
        target = F.one_hot(labels, self.num_classes).to(torch.float32)
        return images, target * share[:, None] + _swapped(target) * (1 - share)[:, None]

    def _box(self, top: Tensor, left: Tensor, height: Tensor, width: Tensor) -> Tensor:
        """Mask, bool [b, 1, size, size], of a box in each image."""
        steps = torch.arange(self.size, device=top.device)
        rows = (steps >= top[:, None]) & (steps < (top + height)[:, None])
        columns = (steps >= left[:, None]) & (steps < (left + width)[:, None])
        return (rows[:, :, None] & columns[:, None, :])[:, None]


def beta_quantiles(alpha: float, count: int = 4097) -> Tensor:
    """Quantiles of Beta(alpha, alpha) at `count` evenly spaced probabilities from 0 to 1; float32 [count].

    alpha = 0 stands for "no mixing": all ones.
    """
    if alpha == 0:
        return torch.ones(count)
    from scipy.special import betaincinv  # scikit-learn brings scipy along

    return torch.from_numpy(betaincinv(alpha, alpha, torch.linspace(0, 1, count, dtype=torch.float64).numpy())).float()


def _windows(
    images: Tensor, pad: int, tops: Tensor, lefts: Tensor, mirrored: Tensor, size: int, *, reflects: bool
) -> Tensor:
    """The window of size x size of each image, with `pad` pixels around it, black or (`reflects`) mirrored at its edge,
    that begins at its `tops` and `lefts` (int64 [b]); left and right are exchanged in it where `mirrored` (bool [b]).

    A row of a window is a run of bytes, and so one index_select, which copies runs, fetches all of them: from the
    images or from the mirrored ones, which stand behind them.
    """
    channels_last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    planes = images.permute(0, 2, 3, 1)[:, None] if channels_last else images[..., None]
    some = planes  # on a GPU all are mirrored: to know which ones need be, the host would wait for it
    behind = torch.arange(len(planes), device=images.device)
    number = torch.where(mirrored, len(planes) + behind, behind)
    if images.device.type == "cpu":
        some = planes.index_select(0, mirrored.nonzero()[:, 0])
        number = torch.where(mirrored, len(planes) - 1 + mirrored.cumsum(0), behind)
    _, count, height, width, values = planes.shape
    height, width = height + 2 * pad, width + 2 * pad
    padded = planes.new_zeros((len(planes) + len(some), count, height, width, values))
    inner = padded[:, :, pad : height - pad, pad : width - pad]
    inner[: len(planes)], inner[len(planes) :] = planes, some.flip(3)
    if reflects and pad:
        _reflect(padded, pad, 2)
        _reflect(padded, pad, 3)

    flat, length = padded.view(-1), size * values
    runs = flat.as_strided((len(flat) - length + 1, length), (1, 1))
    lefts = torch.where(mirrored, width - size - lefts, lefts)
    first = ((number * (count * height) + tops) * width + lefts) * values  # of a window's values, in `flat`
    rows = torch.arange(count * height, device=images.device).view(count, height)[:, :size] * (width * values)
    windows = runs.index_select(0, (first[:, None, None] + rows).view(-1)).view(len(planes), count, size, size, values)
    return windows[:, 0].permute(0, 3, 1, 2) if channels_last else windows[..., 0]


def _reflect(padded: Tensor, pad: int, dim: int) -> None:
    """Fill the outer `pad` pixels along `dim` with the next ones inside, mirrored; the edge is not doubled."""
    inner = padded.shape[dim] - 2 * pad
    padded.narrow(dim, 0, pad).copy_(padded.narrow(dim, pad + 1, pad).flip(dim))
    padded.narrow(dim, pad + inner, pad).copy_(padded.narrow(dim, inner - 1, pad).flip(dim))


def _looked_up(quantiles: Tensor, draw: Tensor) -> Tensor:
    at = draw * (len(quantiles) - 1)
    below = at.long()
    return torch.lerp(quantiles[below], quantiles[below + 1], at - below)


def _swapped(values: Tensor) -> Tensor:
    """Each pair of neighbours exchanged: [1, 0, 3, 2, …]."""
    return values.view(-1, 2, *values.shape[1:]).flip(1).reshape(values.shape)


def _per_image(values: Tensor) -> Tensor:
    return values[:, None, None, None]
