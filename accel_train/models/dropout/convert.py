"""Gives the dropout layers of a model keyed masks."""

from __future__ import annotations

from typing import Any

from torch import nn

from accel_train.models.dropout.keys import DropoutKeys


def convert_dropout(model: nn.Module, seed: int) -> DropoutKeys:
    """Give the dropout layers of `model` masks from the returned keys, in place. Call it before the model is wrapped.

    It assigns `__class__`, as models/padding.py does: names of modules, state dict, hooks and references stay. Only
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
    names = ("p", "drop_prob", "prob", "drop", "dropout")
    return next((float(getattr(layer, name) or 0) for name in names if hasattr(layer, name)), 0.0)
