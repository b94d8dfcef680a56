"""Embeddings of images: what a model computes before its last layer, or in another one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from accel_train.errors import UserError, first_of, nearest
from accel_train.models.wrapping import classifier_names

Embedding = npt.NDArray[np.float32]
"""float32 [features]"""


class Embeddings:
    """Within it (`with`), keeps the values of a layer in each forward pass of `model`, until they are taken."""

    def __init__(self, model: nn.Module, layer: str | None = None) -> None:
        """`layer`: the name of the module whose outputs are meant; None: the inputs of the last layer. Raises UserError
        if there is no such module."""
        self.layer, self._found, self._hooks = layer, list[Any](), list[Any]()
        modules = {name: module for name, module in model.named_modules() if name}
        if layer is not None and layer not in modules:
            raise UserError(
                f"--layer: the model has no layer {layer!r}.{nearest(layer, modules)} Those at its top are "
                f"{first_of([name for name, _ in model.named_children()], 20)}."
            )
        self._modules = [modules[name] for name in (classifier_names(model) if layer is None else [layer])]
        self._channels_last = getattr(model, "output_fmt", "") == "NHWC"  # timm's Swin Transformers, say
        if layer is None:
            self._channels_last = isinstance(self._modules[0], nn.Linear)

    def __enter__(self) -> Embeddings:
        for module in self._modules:
            if self.layer is None:
                hook = module.register_forward_pre_hook(lambda _, inputs: self._found.append(inputs[0]))
            else:
                hook = module.register_forward_hook(lambda _, inputs, output: self._found.append(output))
            self._hooks.append(hook)
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def take(self) -> Embedding:
        """The values in the last forward pass: float32 [images, features], the mean over the positions in the image.

        A model with two last layers, such as a distilled DeiT, has the mean of both inputs, as timm's
        forward_head(pre_logits=True). Raises UserError if the layer has others than one tensor of features an image.
        """
        found, self._found = self._found, []
        if not found or not all(isinstance(each, Tensor) and each.ndim >= 2 for each in found):
            raise UserError(f"--layer {self.layer}: it does not compute one tensor of features; choose another layer.")
        pooled = [self._pooled(each.float()) for each in found]
        values: Embedding = (sum(pooled[1:], pooled[0]) / len(pooled)).cpu().numpy()
        return values

    def _pooled(self, values: Tensor) -> Tensor:
        """[b, features] from these, from tokens [b, tokens, features], or from a map [b, features, H, W]."""
        if values.ndim == 2:
            return values
        if values.ndim == 3 or self._channels_last:
            return values.flatten(1, -2).mean(1)
        return values.flatten(2).mean(2)
