"""Dropout that a model calls as a function: no module can be converted, but torch can redirect the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from accel_train.models.dropout.keys import DropoutKeys, Mask, alpha_dropout, attention, channel_shape, scaled


class KeyedFunctions(TorchFunctionMode):
    """While a model runs in this context, dropout functions take their masks from `keys`.

    The calls are numbered in their order, so a forward pass must make the same calls on all processes. Enter the
    context for each forward pass, after `keys.set_samples`. Each of torch's functions passes through Python then, so
    use it only for a model that needs it: `accel_train.models.independence` says so. A function that gradient
    checkpointing calls again in the backward pass is not redirected.
    """

    def __init__(self, keys: DropoutKeys) -> None:
        super().__init__()
        self.keys = keys
        keys.functions_draw = True

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        replacement = REPLACEMENTS.get(func)
        result = None if replacement is None else replacement(self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is None else result

    def mask(self, shape: Sequence[int], p: float) -> Mask | None:
        return self.keys.mask(self.keys.function_row, shape, self.keys.rate(p))

    # Each returns None if torch's own function must be called.

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor | None:
        mask = self.mask(input.shape, p) if training and p > 0 else None
        return None if mask is None else scaled(input, mask, inplace)

    def channel_dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor | None:
        mask = self.mask(channel_shape(input.shape), p) if training and p > 0 else None
        return None if mask is None else scaled(input, mask, inplace)

    def alpha_dropout(
        self, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> Tensor | None:
        mask = self.mask(input.shape, p) if training and p > 0 else None
        return None if mask is None else alpha_dropout(input, mask, inplace)

    def feature_alpha_dropout(
        self, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> Tensor | None:
        mask = self.mask(channel_shape(input.shape), p) if training and p > 0 else None
        return None if mask is None else alpha_dropout(input, mask, inplace)

    def bernoulli_(self, values: Tensor, p: Tensor | float = 0.5, **options: Any) -> Tensor | None:
        """So timm's drop_path and torchvision's stochastic_depth draw. `values` are 1 with probability `p`."""
        if isinstance(p, Tensor) or options or not 0 < p < 1:
            return None
        # Those functions divide by `p` itself, so compare all 64 bits.
        words = self.keys.words(self.keys.function_row, values.shape)
        return None if words is None else values.copy_((words < int((p - 0.5) * 2**64)).view(values.shape))

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        shape = (*query.shape[:-1], key.shape[-2])
        mask = self.mask(shape, dropout_p) if dropout_p > 0 and not enable_gqa else None
        return None if mask is None else attention(query, key, value, mask, attn_mask, is_causal, scale)


REPLACEMENTS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    F.dropout: KeyedFunctions.dropout,
    F.dropout1d: KeyedFunctions.channel_dropout,
    F.dropout2d: KeyedFunctions.channel_dropout,
    F.dropout3d: KeyedFunctions.channel_dropout,
    F.alpha_dropout: KeyedFunctions.alpha_dropout,
    F.feature_alpha_dropout: KeyedFunctions.feature_alpha_dropout,
    F.scaled_dot_product_attention: KeyedFunctions.attention,
    torch.Tensor.bernoulli_: KeyedFunctions.bernoulli_,
}
