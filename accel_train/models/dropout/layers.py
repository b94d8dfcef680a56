"""Dropout, drop path and attention's dropout of torch, timm and torchvision, with masks from `DropoutKeys`.

Rarer kinds draw from torch's generators: the trial of the model finds them, and each forward pass of such a model has
one virtual batch, whose random numbers are seeded (models/trial.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import timm.layers
import torch.nn.functional as F
import torchvision.ops
from torch import Tensor, nn

from accel_train.models.dropout.keys import (
    DropoutKeys,
    Mask,
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
    def keyed(self: Any, input: Tensor) -> Tensor | None:
        mask = self.mask(input.shape, self.p)
        return None if mask is None else scaled(input, mask, self.inplace)


class _Channels(_Keyed):
    def keyed(self: Any, input: Tensor) -> Tensor | None:
        # torch takes values of three dimensions for a single sample without a batch.
        mask = self.mask(channel_shape(input.shape), self.p) if input.dim() == 4 else None
        return None if mask is None else scaled(input, mask, self.inplace)


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


KEYED: dict[type[nn.Module], type[nn.Module]] = {
    kind: type(f"Keyed{kind.__name__}", (mixin, kind), {})
    for kind, mixin in (
        (nn.Dropout, _Elements),
        (nn.Dropout2d, _Channels),
        (nn.MultiheadAttention, _Attention),
        (timm.layers.DropPath, _Path),
        (torchvision.ops.StochasticDepth, _Depth),
    )
}
"""The classes that `convert_dropout` replaces, and by what."""
