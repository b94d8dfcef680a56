"""Test-time augmentation: a model whose probabilities are the mean over several views of each image.

Krizhevsky et al. 2012 (https://papers.nips.cc/paper/4824), section 4.1: five crops and their mirror images, whose
softmax outputs are averaged. The training does not use it, and what is measured with it has a name of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_train.config.declaration import Tta
from accel_train.config.schema import Augment
from accel_train.data.transforms.parameters import resize_default
from accel_train.errors import UserError, nearest


def check_tta(name: str) -> None:
    """Raise UserError unless `name` is one of `Tta`: from Python it may be anything."""
    if name not in get_args(Tta):
        known = ", ".join(get_args(Tta))
        raise UserError(f"tta: expected one of {known}, found {name!r}.{nearest(str(name), get_args(Tta))}")


def size_of_images(tta: Tta, augment: Augment, size: int, *, one_size: bool) -> int:
    """The height and width of the images from which views of `size` pixels are taken: for ten-crop, their short side.

    `one_size`: whether the data has images of one size, which are resized only with --augment.resize. Raises UserError
    if there is nothing around the centre to crop.
    """
    if tta != "ten-crop":
        return size
    short_side = augment.resize or (size if one_size else resize_default(size))
    if short_side <= size:
        raise UserError(
            f"--tta ten-crop: images are resized to {short_side} pixels, and the model takes {size}, so all crops are "
            f"the same; give a larger --augment.resize, such as {resize_default(size)}, or --tta flip."
        )
    return short_side


class MeanOverViews(nn.Module):
    """The model `model` with the mean of its probabilities over the views of each image, in float32.

    Returned as logits: the logarithm of the mean softmax; with several labels an image the logit of the mean sigmoid.
    So the softmax (sigmoid) of what it returns is that mean. The views are added in a fixed order.
    """

    def __init__(self, model: nn.Module, tta: Tta, size: int, *, multi_label: bool) -> None:
        """`model`: float32 [b, channels, size, size] to logits [b, classes]."""
        super().__init__()
        self.model, self.size = model, size
        self.views: Callable[[Tensor], Sequence[Tensor]] = self._ten_crop if tta == "ten-crop" else _flip
        self.combined = mean_of_sigmoids if multi_label else mean_of_softmaxes

    def _ten_crop(self, images: Tensor) -> Sequence[Tensor]:
        from torchvision.transforms.v2 import functional

        crops: Sequence[Tensor] = functional.ten_crop(images, [self.size, self.size])
        return crops

    def forward(self, images: Tensor) -> Tensor:
        """`images`: float32 [b, channels, H, W] as `size_of_images` says. Returns logits, float32 [b, classes]."""
        # A copy: the CUDA graphs of torch.compile write the output of each call to the same memory.
        logits = [self.model(view).to(torch.float32, copy=True) for view in self.views(images)]
        return self.combined(torch.stack(logits))


def with_tta(model: nn.Module, tta: Tta, size: int, *, multi_label: bool) -> nn.Module:
    """The model itself without test-time augmentation."""
    return model if tta == "none" else MeanOverViews(model, tta, size, multi_label=multi_label)


def _flip(images: Tensor) -> Sequence[Tensor]:
    return images, images.flip(-1)


def mean_of_softmaxes(logits: Tensor) -> Tensor:
    """log(mean of softmax(logits) over the views): [views, b, classes] to [b, classes]."""
    return F.log_softmax(logits, 2).logsumexp(0) - math.log(len(logits))


def mean_of_sigmoids(logits: Tensor) -> Tensor:
    """log(p / (1 - p)), p the mean of sigmoid(logits) over the views: [views, b, classes] to [b, classes]."""
    return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)
