"""The dropout layers of torch, timm and torchvision, with masks from `DropoutKeys`.

Each class overrides only `forward`, and falls back to its parent's where there is no keyed mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import timm.layers
import torch
import torch.nn.functional as F
import torchvision.ops
from timm.models.efficientvit_msra import ResidualDrop
from torch import Tensor, nn

from accel_train.launch.compat import DropoutNd
from accel_train.models.dropout.keys import (
    DropoutKeys,
    Mask,
    alpha_dropout,
    attention,
    channel_shape,
    sample_shape,
    scaled,
)


class _Keyed:
    """What `convert_dropout` adds to a module."""

    keys: DropoutKeys
    row: int

    def mask(self, shape: Sequence[int], p: float) -> Mask | None:
        return self.keys.mask(self.row, shape, self.keys.rate(p))


class _KeyedDropout(_Keyed, DropoutNd):
    """A dropout layer of torch."""

    by_channel = False
    dimensions: int | None = None
    """Of the values, including the batch; torch takes others for a single sample without a batch."""
    drop = staticmethod(scaled)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        shape = channel_shape(input.shape) if self.by_channel else input.shape
        mask = self.mask(shape, self.p) if self.dimensions in (None, input.dim()) else None
        if mask is None:
            return super().forward(input)  # type: ignore[no-any-return]
        return self.drop(input, mask, self.inplace)


class KeyedDropout(_KeyedDropout, nn.Dropout):
    pass


class KeyedDropout1d(_KeyedDropout, nn.Dropout1d):
    by_channel, dimensions = True, 3


class KeyedDropout2d(_KeyedDropout, nn.Dropout2d):
    by_channel, dimensions = True, 4


class KeyedDropout3d(_KeyedDropout, nn.Dropout3d):
    by_channel, dimensions = True, 5


class KeyedAlphaDropout(_KeyedDropout, nn.AlphaDropout):
    drop = staticmethod(alpha_dropout)


class KeyedFeatureAlphaDropout(_KeyedDropout, nn.FeatureAlphaDropout):
    by_channel, drop = True, staticmethod(alpha_dropout)


class KeyedMultiheadAttention(_Keyed, nn.MultiheadAttention):
    """nn.MultiheadAttention for what image classifiers need: self-attention of [n, tokens, d] without a mask."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        known = query is key is value and query.dim() == 3 and self.batch_first and self.in_proj_weight is not None
        known = known and self.bias_k is None and not self.add_zero_attn and not args and "need_weights" in options
        known = known and all(option is None or option is False for option in options.values())
        mask = None
        if known and self.training and self.dropout > 0:
            n, tokens, _ = query.shape
            mask = self.mask((n, self.num_heads, tokens, tokens), self.dropout)
        if mask is None:
            return super().forward(query, key, value, *args, **options)
        projected = F.linear(query, self.in_proj_weight, self.in_proj_bias)
        # [n, tokens, 3 d] -> three times [n, heads, tokens, d / heads]
        parts = projected.view(n, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        attended = attention(parts[0], parts[1], parts[2], mask)
        return self.out_proj(attended.transpose(1, 2).flatten(2)), None


class KeyedDropPath(_Keyed, timm.layers.DropPath):  # type: ignore[misc]
    """timm's DropPath: drops a residual branch of a sample."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.drop_prob == 0:
            return x
        mask = self.mask(sample_shape(x.shape), self.drop_prob)
        if mask is None:
            return super().forward(x)  # type: ignore[no-any-return]
        return scaled(x, mask) if self.scale_by_keep else x * mask.keep


class KeyedStochasticDepth(_Keyed, torchvision.ops.StochasticDepth):  # type: ignore[misc]
    """torchvision's StochasticDepth in mode "row", which is a DropPath."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        mask = self.mask(sample_shape(input.shape), self.p) if self.mode == "row" else None
        return super().forward(input) if mask is None else scaled(input, mask)


class KeyedResidualDrop(_Keyed, ResidualDrop):  # type: ignore[misc]
    """The residual connection with DropPath of timm's EfficientViT (MSRA)."""

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(sample_shape(x.shape), self.drop) if self.training and self.drop > 0 else None
        return super().forward(x) if mask is None else x + scaled(self.m(x), mask)


class KeyedDropBlock2d(_Keyed, timm.layers.DropBlock2d):  # type: ignore[misc]
    """timm's DropBlock2d without noise."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.drop_prob:
            return x
        n, channels, height, width = x.shape
        block = min(self.block_size, height), min(self.block_size, width)
        p = self.keys.rate(self.drop_prob) * self.gamma_scale
        shape = (n, 1 if self.couple_channels else channels, height, width)
        mask = None if self.with_noise else self.keys.mask(self.row, shape, _block_rate(p, (height, width), block))
        if mask is None:
            return super().forward(x)  # type: ignore[no-any-return]
        blocks = F.max_pool2d((~mask.keep).to(x.dtype), block, 1, (block[0] // 2, block[1] // 2))
        # With an even size there is one row or column too many.
        blocks = blocks[..., (block[0] + 1) % 2 :, (block[1] + 1) % 2 :]
        return _without_blocks(x, blocks, self.scale_by_keep, self.inplace)


class _KeyedDropBlock(_Keyed):
    """torchvision's DropBlock of [n, C, H, W] or [n, C, D, H, W]."""

    dimensions: int

    def forward(self: Any, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        result = self.without_blocks(input) if input.dim() == self.dimensions else None
        return super().forward(input) if result is None else result  # type: ignore[misc, no-any-return]

    def without_blocks(self: Any, x: Tensor) -> Tensor | None:
        sides = x.shape[2:]
        block = min(self.block_size, *sides)
        starts = (*x.shape[:2], *(side - block + 1 for side in sides))
        rate = _block_rate(self.keys.rate(self.p), sides, (block,) * len(sides))
        mask = self.keys.mask(self.row, starts, rate) if block % 2 else None
        if mask is None:
            return None
        padded = F.pad((~mask.keep).to(x.dtype), [block // 2] * 2 * len(sides))
        pool = F.max_pool2d if len(sides) == 2 else F.max_pool3d
        return _without_blocks(x, pool(padded, block, 1, block // 2), True, self.inplace)


class KeyedTorchvisionDropBlock2d(_KeyedDropBlock, torchvision.ops.DropBlock2d):  # type: ignore[misc]
    dimensions = 4


class KeyedTorchvisionDropBlock3d(_KeyedDropBlock, torchvision.ops.DropBlock3d):  # type: ignore[misc]
    dimensions = 5


def _block_rate(p: float, sides: Sequence[int], block: Sequence[int]) -> float:
    """How often a place starts a dropped block, so that about `p` of all elements are dropped.

    Ghiasi et al., "DropBlock", NeurIPS 2018, equation 1: gamma, in any number of dimensions.
    """
    places = prod([side - length + 1 for side, length in zip(sides, block, strict=True)])
    return min(1.0, p * prod(sides) / prod(block) / places)


def _without_blocks(values: Tensor, blocks: Tensor, rescaled: bool, inplace: bool) -> Tensor:
    """Zero where `blocks` (of the same dtype) is 1, and the rest scaled by count / count of ones.

    The libraries count over the micro-batch, which makes its samples depend on each other; this counts over a sample.
    """
    kept = 1 - blocks
    if rescaled:
        mean = kept.flatten(1).float().mean(1).clamp(min=1e-7)
        kept = kept / mean.view(sample_shape(kept.shape)).to(kept.dtype)
    return values.mul_(kept) if inplace else values * kept


class _KeyedPatchDropout(_Keyed):
    """timm's patch dropout: a random choice of each sample's tokens [n, tokens, d]."""

    prob: float
    training: bool
    num_prefix_tokens: int
    ordered: bool

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """The remaining tokens, and their numbers (int64 [n, kept], without the prefix tokens)."""
        if not self.training or self.prob == 0:
            return None
        prefix, tokens = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        words = self.keys.words(self.row, tokens.shape[:2])
        if words is None:
            return None
        count = max(1, int(tokens.shape[1] * (1 - self.prob)))
        numbers = words.view(tokens.shape[:2]).argsort(1)[:, :count]
        if self.ordered:
            numbers = numbers.sort(1)[0]
        places = numbers.view(*numbers.shape, *(1 for _ in x.shape[2:])).expand(-1, -1, *x.shape[2:])
        return torch.cat((prefix, tokens.gather(1, places)), 1), numbers


class KeyedPatchDropout(_KeyedPatchDropout, timm.layers.PatchDropout):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        chosen = self.chosen(x)
        return super().forward(x) if chosen is None else chosen[0]


class KeyedPatchDropoutWithIndices(_KeyedPatchDropout, timm.layers.PatchDropoutWithIndices):  # type: ignore[misc]
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        chosen = self.chosen(x)
        return super().forward(x) if chosen is None else chosen


KEYED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: KeyedDropout,
    nn.Dropout1d: KeyedDropout1d,
    nn.Dropout2d: KeyedDropout2d,
    nn.Dropout3d: KeyedDropout3d,
    nn.AlphaDropout: KeyedAlphaDropout,
    nn.FeatureAlphaDropout: KeyedFeatureAlphaDropout,
    nn.MultiheadAttention: KeyedMultiheadAttention,
    timm.layers.DropPath: KeyedDropPath,
    timm.layers.DropBlock2d: KeyedDropBlock2d,
    timm.layers.PatchDropout: KeyedPatchDropout,
    timm.layers.PatchDropoutWithIndices: KeyedPatchDropoutWithIndices,
    ResidualDrop: KeyedResidualDrop,
    torchvision.ops.StochasticDepth: KeyedStochasticDepth,
    torchvision.ops.DropBlock2d: KeyedTorchvisionDropBlock2d,
    torchvision.ops.DropBlock3d: KeyedTorchvisionDropBlock3d,
}
"""The classes that `convert_dropout` replaces, and by what."""
