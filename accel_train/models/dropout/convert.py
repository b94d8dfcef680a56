"""Gives the dropout of a model keyed masks: its layers are converted, its calls of torch's functions redirected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from accel_train.models.dropout.keys import DropoutKeys, Mask, attention, channel_shape, scaled


def convert_dropout(model: nn.Module, seed: int) -> DropoutKeys:
    """Give the dropout layers of `model` masks from the returned keys, in place. Call it before the model is wrapped.

    It assigns `__class__`, as optim/performance.py does: names of modules, state dict, hooks and references stay. Only
    the exact classes of torch, timm and torchvision are converted, because a subclass may mean something else. A layer
    whose rate is 0 draws nothing, and stays. timm's attention modules with dropout change to their unfused form, which
    calls their dropout layer.
    """
    from accel_train.models.dropout.layers import KEYED  # imports timm and torchvision, which takes seconds

    layers: dict[str, Any] = {
        name: module for name, module in model.named_modules() if type(module) in KEYED and _rate(module) > 0
    }
    keys = DropoutKeys(seed, list(layers))
    for row, layer in enumerate(layers.values()):
        layer.__class__ = KEYED[type(layer)]
        layer.keys, layer.row = keys, row
    attention: Any
    for attention in model.modules():
        if getattr(attention, "fused_attn", False) and getattr(getattr(attention, "attn_drop", None), "p", 0) > 0:
            attention.fused_attn = False
    return keys


def _rate(layer: nn.Module) -> float:
    """The drop rate of a layer, by the name that its class gives it."""
    names = ("p", "drop_prob", "dropout")
    return next((float(getattr(layer, name) or 0) for name in names if hasattr(layer, name)), 0.0)


class KeyedFunctions(TorchFunctionMode):
    """While a model runs in this context, dropout functions take their masks from `keys`.

    The calls are numbered in their order, so a forward pass must make the same calls on all processes. Enter the
    context for each forward pass, after `keys.set_samples`. Each of torch's functions passes through Python then, so
    use it only for a model that needs it: the trial of the model (models/trial.py) says so. A function that gradient
    checkpointing calls again in the backward pass is not redirected.
    """

    def __init__(self, keys: DropoutKeys) -> None:
        super().__init__()
        self.keys = keys

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        replacement = REPLACEMENTS.get(func)
        result = None if replacement is None else replacement(self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is None else result

    def mask(self, shape: Sequence[int], p: float) -> Mask | None:
        return self.keys.mask(self.keys.function_row, shape, self.keys.rate(p))

    # Each of these, and what `_dropping` returns, returns None if torch's own function must be called.

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


def _dropping(*, channels: bool) -> Callable[..., Tensor | None]:
    """The replacement of a function that drops elements, or whole channels."""

    def replacement(
        functions: KeyedFunctions, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor | None:
        shape = channel_shape(input.shape) if channels else input.shape
        mask = functions.mask(shape, p) if training and p > 0 else None
        return None if mask is None else scaled(input, mask, inplace)

    return replacement


REPLACEMENTS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    F.dropout: _dropping(channels=False),
    F.dropout2d: _dropping(channels=True),
    F.scaled_dot_product_attention: KeyedFunctions.attention,
    torch.Tensor.bernoulli_: KeyedFunctions.bernoulli_,
}
