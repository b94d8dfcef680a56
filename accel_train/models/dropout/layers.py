"""The dropout layers of torch, timm and torchvision, with masks from `DropoutKeys`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import timm.layers
import torch
import torch.nn.functional as F
import torchvision.ops
from timm.models.efficientvit_msra import ResidualDrop
from torch import Tensor, nn

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
    """Mixed into a dropout layer: in training its forward pass is `keyed`, unless that returns None."""

    keys: DropoutKeys
    row: int
    keyed: Callable[..., Any]
    """Takes the arguments of forward. None: the layer's own must be called, because its rate is 0, there is no mask,
    or it is called in a way that `keyed` does not know."""

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        result = self.keyed(*args, **options) if self.training else None
        return super().forward(*args, **options) if result is None else result  # type: ignore[misc]

    def mask(self, shape: Sequence[int], p: float) -> Mask | None:
        return self.keys.mask(self.row, shape, self.keys.rate(p)) if p > 0 else None


class _Elements(_Keyed):
    drop = staticmethod(scaled)

    def keyed(self: Any, input: Tensor) -> Tensor | None:
        mask = self.mask(input.shape, self.p)
        return None if mask is None else self.drop(input, mask, self.inplace)


class _Channels(_Keyed):
    drop = staticmethod(scaled)
    dimensions: int | None = None
    """Of the values, including the batch; torch takes others for a single sample without a batch."""

    def keyed(self: Any, input: Tensor) -> Tensor | None:
        known = self.dimensions in (None, input.dim())
        mask = self.mask(channel_shape(input.shape), self.p) if known else None
        return None if mask is None else self.drop(input, mask, self.inplace)


class _Attention(_Keyed):
    """nn.MultiheadAttention for what image classifiers need: self-attention of [n, tokens, d] without a mask."""

    def keyed(self: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        known = query is key is value and query.dim() == 3 and self.batch_first and self.in_proj_weight is not None
        known = known and self.bias_k is None and not self.add_zero_attn and not args and "need_weights" in options
        if not known or not all(option is None or option is False for option in options.values()):
            return None
        n, tokens, _ = query.shape
        mask = self.mask((n, self.num_heads, tokens, tokens), self.dropout)
        if mask is None:
            return None
        projected = F.linear(query, self.in_proj_weight, self.in_proj_bias)
        # [n, tokens, 3 d] -> three times [n, heads, tokens, d / heads]
        parts = projected.view(n, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        attended = attention(parts[0], parts[1], parts[2], mask)
        return self.out_proj(attended.transpose(1, 2).flatten(2)), None


class _Path(_Keyed):
    """timm's DropPath: drops a residual branch of a sample."""

    def keyed(self: Any, x: Tensor) -> Tensor | None:
        mask = self.mask(sample_shape(x.shape), self.drop_prob)
        if mask is None:
            return None
        return scaled(x, mask) if self.scale_by_keep else x * mask.keep


class _Depth(_Keyed):
    """torchvision's StochasticDepth in mode "row", which is a DropPath."""

    def keyed(self: Any, input: Tensor) -> Tensor | None:
        mask = self.mask(sample_shape(input.shape), self.p) if self.mode == "row" else None
        return None if mask is None else scaled(input, mask)


class _ResidualDrop(_Keyed):
    """The residual connection with DropPath of timm's EfficientViT (MSRA)."""

    def keyed(self: Any, x: Tensor) -> Tensor | None:
        mask = self.mask(sample_shape(x.shape), self.drop)
        return None if mask is None else x + scaled(self.m(x), mask)


class _TimmBlocks(_Keyed):
    """timm's DropBlock2d without noise."""

    def keyed(self: Any, x: Tensor) -> Tensor | None:
        n, channels, height, width = x.shape
        block = min(self.block_size, height), min(self.block_size, width)
        if self.with_noise or not self.drop_prob:
            return None
        rate = _block_rate(self.keys.rate(self.drop_prob) * self.gamma_scale, (height, width), block)
        mask = self.keys.mask(self.row, (n, 1 if self.couple_channels else channels, height, width), rate)
        if mask is None:
            return None
        blocks = F.max_pool2d((~mask.keep).to(x.dtype), block, 1, (block[0] // 2, block[1] // 2))
        # With an even size there is one row or column too many.
        blocks = blocks[..., (block[0] + 1) % 2 :, (block[1] + 1) % 2 :]
        return _without_blocks(x, blocks, self.scale_by_keep, self.inplace)


class _Blocks(_Keyed):
    """torchvision's DropBlock of [n, C, H, W] or [n, C, D, H, W]."""

    dimensions: int

    def keyed(self: Any, x: Tensor) -> Tensor | None:
        sides = x.shape[2:]
        block = min(self.block_size, *sides)
        if x.dim() != self.dimensions or self.p == 0 or block % 2 == 0:
            return None
        starts = (*x.shape[:2], *(side - block + 1 for side in sides))
        mask = self.keys.mask(self.row, starts, _block_rate(self.keys.rate(self.p), sides, (block,) * len(sides)))
        if mask is None:
            return None
        padded = F.pad((~mask.keep).to(x.dtype), [block // 2] * 2 * len(sides))
        pool = F.max_pool2d if len(sides) == 2 else F.max_pool3d
        return _without_blocks(x, pool(padded, block, 1, block // 2), True, self.inplace)


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


class _Patches(_Keyed):
    """timm's patch dropout: a random choice of each sample's tokens [n, tokens, d]."""

    def keyed(self: Any, x: Tensor) -> Any:
        """The remaining tokens; of PatchDropoutWithIndices also their numbers, int64 [n, kept], without the prefix."""
        prefix, tokens = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        words = self.keys.words(self.row, tokens.shape[:2]) if self.prob > 0 else None
        if words is None:
            return None
        count = max(1, int(tokens.shape[1] * (1 - self.prob)))
        numbers = words.view(tokens.shape[:2]).argsort(1)[:, :count]
        if self.ordered:
            numbers = numbers.sort(1)[0]
        places = numbers.view(*numbers.shape, *(1 for _ in x.shape[2:])).expand(-1, -1, *x.shape[2:])
        chosen = torch.cat((prefix, tokens.gather(1, places)), 1)
        return (chosen, numbers) if isinstance(self, timm.layers.PatchDropoutWithIndices) else chosen


KEYED: dict[type[nn.Module], type[nn.Module]] = {
    kind: type(f"Keyed{kind.__name__}", (mixin, kind), attributes)
    for kind, mixin, attributes in (
        (nn.Dropout, _Elements, {}),
        (nn.Dropout1d, _Channels, {"dimensions": 3}),
        (nn.Dropout2d, _Channels, {"dimensions": 4}),
        (nn.Dropout3d, _Channels, {"dimensions": 5}),
        (nn.AlphaDropout, _Elements, {"drop": staticmethod(alpha_dropout)}),
        (nn.FeatureAlphaDropout, _Channels, {"drop": staticmethod(alpha_dropout)}),
        (nn.MultiheadAttention, _Attention, {}),
        (timm.layers.DropPath, _Path, {}),
        (timm.layers.DropBlock2d, _TimmBlocks, {}),
        (timm.layers.PatchDropout, _Patches, {}),
        (timm.layers.PatchDropoutWithIndices, _Patches, {}),
        (ResidualDrop, _ResidualDrop, {}),
        (torchvision.ops.StochasticDepth, _Depth, {}),
        (torchvision.ops.DropBlock2d, _Blocks, {"dimensions": 4}),
        (torchvision.ops.DropBlock3d, _Blocks, {"dimensions": 5}),
    )
}
"""The classes that `convert_dropout` replaces, and by what."""
