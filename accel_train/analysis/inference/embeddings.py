"""Embeddings of images: what a model computes before its last layer, or in another one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from accel_train.errors import UserError, first_of, nearest
from accel_train.models.classifier import required_classifier

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
        names = required_classifier(model, "--embeddings") if layer is None else [layer]
        self._modules = [modules[name] for name in names]
        self._channels_last = getattr(model, "output_fmt", "") == "NHWC"  # timm's Swin Transformers, say
        if layer is None:
            self._channels_last = isinstance(self._modules[0], nn.Linear)

    def __enter__(self) -> Embeddings:
        for module in self._modules:
            if self.layer is None:
                hook = module.register_forward_pre_hook(lambda _, inputs: self._keep(inputs[0]))
            else:
                hook = module.register_forward_hook(lambda _, inputs, output: self._keep(output))
            self._hooks.append(hook)
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def take(self, images: int) -> Embedding:
        """The values in the last forward pass: float32 [images, features], the mean over the positions in the image.

        A model with two last layers, such as a distilled DeiT, has the mean of both inputs, as timm's
        forward_head(pre_logits=True). Raises UserError if the layer has others than one tensor of features an image,
        or other features each time that the model calls it.
        """
        found, self._found = self._found, []
        of_layer = "--embeddings: the last layer" if self.layer is None else f"--layer {self.layer}: it"
        shapes = {None if each is None else tuple(each.shape) for each in found}
        if len(shapes) > 1 and None not in shapes:
            raise UserError(f"{of_layer} has other features each time that the model calls it; name another --layer.")
        if len(shapes) != 1 or None in shapes or found[0].shape[0] != images:
            raise UserError(f"{of_layer} does not compute one tensor of features for each image; name another --layer.")
        values: Embedding = (sum(found[1:], found[0]) / len(found)).cpu().numpy()
        return values

    def _keep(self, values: Any) -> None:
        """Keep the pooled values at once: the next layer may overwrite them, as ReLU(inplace=True) does. None: they
        are not a tensor of features."""
        suits = isinstance(values, Tensor) and values.ndim >= 2
        self._found.append(self._pooled(values.to(torch.float32, copy=True)) if suits else None)

    def _pooled(self, values: Tensor) -> Tensor:
        """[b, features] from these, from tokens [b, tokens, features], or from a map [b, features, H, W]."""
        if values.ndim == 2:
            return values
        if values.ndim == 3 or self._channels_last:
            return values.flatten(1, -2).mean(1)
        return values.flatten(2).mean(2)
