"""Convolutions of small images that skip the kernel taps that see only padding.

A network for 224x224 pixels halves the size five times: one pixel is left of CIFAR's 32x32, and only the centre of a
3x3 kernel with padding 1 sees it. The other eight taps are multiplied by zeros and have zero gradients, so skipping
them gives the same function. On a CPU an update of torchvision's ResNet-18 on 32x32 is 1.15 times as fast.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class PaddingAwareConv2d(nn.Conv2d):
    """An nn.Conv2d with the same parameters that crops its kernel to the taps that see a pixel."""

    def forward(self, images: Tensor) -> Tensor:
        """The same as nn.Conv2d's, for images [b, C, H, W]."""
        assert isinstance(self.padding, tuple)
        geometry = zip(images.shape[-2:], self.kernel_size, self.stride, self.padding, strict=True)
        (top, bottom, above), (left, right, beside) = (_taps(*side) for side in geometry)
        weight = self.weight
        if (bottom - top, right - left) != self.kernel_size:
            weight = weight[:, :, top:bottom, left:right].contiguous()
        return F.conv2d(images, weight, self.bias, self.stride, (above, beside), groups=self.groups)


def use_padding_aware_convolutions(model: nn.Module) -> None:
    """Make the plain convolutions of `model` padding-aware in place; weights and their names do not change.

    It assigns `__class__`, so that other references to a module, hooks and parameters stay valid. That works because
    PaddingAwareConv2d only overrides `forward` (checked with torch 2.15; see tests/models/test_padding.py).
    """
    for module in model.modules():
        plain = type(module) is nn.Conv2d and isinstance(module.padding, tuple) and module.padding_mode == "zeros"
        if plain and module.dilation == (1, 1):
            module.__class__ = PaddingAwareConv2d


def _taps(length: int, kernel: int, stride: int, padding: int) -> tuple[int, int, int]:
    """(first tap, end, padding) along one side: the taps that see one of `length` pixels, and the remaining padding.

    Tap t of output o sees pixel o*stride - padding + t.
    """
    outputs = (length + 2 * padding - kernel) // stride + 1
    first, end = max(0, padding - (outputs - 1) * stride), min(kernel, length + padding)
    left = padding - first
    if (
        first >= end or (length + 2 * left - (end - first)) // stride + 1 != outputs
    ):  # no tap sees a pixel, or there would be another output
        return 0, kernel, padding
    return first, end, left
