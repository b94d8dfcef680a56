"""Convolutions of small images, without those of the kernel's taps that never see anything but padding.

A net for 224x224 pixels halves them five times: of CIFAR's 32x32 one pixel is left, and of a 3x3 kernel with a padding
of 1 only the middle ever meets it. The other eight taps are multiplied with zeros, and get a gradient of zeros: to
leave them out is the same function. On a CPU an update of torchvision's ResNet-18 on 32x32 is 1.15 times as fast.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class PaddingAwareConv2d(nn.Conv2d):
    """An nn.Conv2d, weights and all, that crops its kernel to what the images let it see."""

    def forward(self, images: Tensor) -> Tensor:
        """`images` [b, C, H, W], as nn.Conv2d takes them."""
        assert isinstance(self.padding, tuple)
        geometry = zip(images.shape[-2:], self.kernel_size, self.stride, self.padding, strict=True)
        (top, bottom, above), (left, right, beside) = (_taps(*each) for each in geometry)
        weight = self.weight
        if (bottom - top, right - left) != self.kernel_size:
            weight = weight[:, :, top:bottom, left:right].contiguous()
        return F.conv2d(images, weight, self.bias, self.stride, (above, beside), groups=self.groups)


def use_padding_aware_convolutions(model: nn.Module) -> None:
    """Make plain convolutions of `model` padding-aware, in place: its weights and their names stay as they are."""
    for module in model.modules():
        plain = type(module) is nn.Conv2d and isinstance(module.padding, tuple) and module.padding_mode == "zeros"
        if plain and module.dilation == (1, 1):
            module.__class__ = PaddingAwareConv2d


def _taps(length: int, kernel: int, stride: int, padding: int) -> tuple[int, int, int]:
    """Along one side: the first tap that sees one of `length` pixels, the end of those that do, and the padding that is
    left. Tap t of output o lies on pixel o*stride - padding + t."""
    outputs = (length + 2 * padding - kernel) // stride + 1
    first, end = max(0, padding - (outputs - 1) * stride), min(kernel, length + padding)
    left = padding - first
    if first >= end or (length + 2 * left - (end - first)) // stride + 1 != outputs:  # none sees one; one output more
        return 0, kernel, padding
    return first, end, left
