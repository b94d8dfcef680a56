"""Colour jitter of a batch on the device.

The result for an image depends on its own pixels and parameters alone, to the last bit, whatever else the batch
contains. So nothing here is a matrix product, a convolution or a mean of floats: these add in an order that depends on
the batch's size. Each product and each sum is an operation of its own, because one processor fuses them and another
does not.

Pixels are floats from 0 to 255, which are not rounded between the steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accel_train.config.schema import Augment
from accel_train.data.transforms.parameters import SLOTS, Column, Jitter, jitter_strengths, over_pixels

CHUNK = 1 << 18  # numbers that a CPU changes at a time: they fit into its cache


def jitter_colours(images: Tensor, parameters: Tensor, augment: Augment) -> Tensor:
    """Jittered images, a new float32 tensor [b, C, H, W]. `parameters`: see AugmentParameters."""
    images = images.to(torch.float32, copy=True)
    hue = jitter_strengths(augment)[Jitter.HUE] > 0
    kinds = parameters[:, Column.KIND : Column.KIND + SLOTS]
    factors = parameters[:, Column.FACTOR : Column.FACTOR + SLOTS].view(torch.float32)
    hues = parameters[:, Column.HUE].view(torch.float32)

    def jitter(images: Tensor, kinds: Tensor, factors: Tensor, hues: Tensor) -> Tensor:
        for slot in range(SLOTS if hue else SLOTS // 2):
            if slot == SLOTS // 2:
                images = _shift_hue(images, hues)
            images = _blend(images, kinds[:, slot], factors[:, slot])
        return images

    if images.device.type != "cpu":
        return jitter(images, kinds, factors, hues)
    at_once = max(1, CHUNK // images[0].numel())
    for start in range(0, len(images), at_once):
        rows = slice(start, start + at_once)
        images[rows] = jitter(images[rows].contiguous(), kinds[rows], factors[rows], hues[rows])
    return images


def _grey(images: Tensor) -> Tensor:
    """The brightness of each pixel, [b, 1, H, W], with torchvision's weights of red, green and blue."""
    if images.shape[1] == 1:
        return images
    red, green, blue = (images[:, channel : channel + 1] for channel in range(3))
    return red.mul(0.2989).add_(green.mul(0.587)).add_(blue.mul(0.114))


def _blend(images: Tensor, kinds: Tensor, factors: Tensor) -> Tensor:
    """Images with another brightness, contrast or saturation (`kinds`), by `factors` (float32 [b]); 1 changes nothing.

    Each is a mixture with an image without it: black, the mean brightness, or grey.
    """
    # A CPU computes only what these images need; the rest would change nothing.
    needed = set(kinds[factors != 1].tolist()) if images.device.type == "cpu" else set(Jitter)
    if not needed:
        return images
    if needed == {Jitter.BRIGHTNESS}:
        return images.mul(over_pixels(factors)).clamp_(0, 255)
    grey = _grey(images)
    mean = torch.zeros_like(factors)
    if Jitter.CONTRAST in needed:
        # Of integers, because a sum of floats depends on the order in which they are added.
        total = grey.mul(256).round_().to(torch.int32).sum((1, 2, 3), dtype=torch.int64)
        mean = total.to(torch.float32).div_(256 * grey[0].numel()).mul_(kinds == Jitter.CONTRAST)
    without = torch.where(over_pixels(kinds == Jitter.SATURATION), grey, over_pixels(mean))
    return images.mul(over_pixels(factors)).add_(without.mul_(over_pixels(1 - factors))).clamp_(0, 255)


def _shift_hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Images [b, 3, H, W] whose hue is shifted by `shifts` (float32 [b]), in sixths of the colour wheel.

    The value and the chroma of HSV stay; see https://en.wikipedia.org/wiki/HSL_and_HSV.
    """
    red, green, blue = (images[:, channel : channel + 1] for channel in range(3))
    value = images.amax(1, keepdim=True)
    chroma = value - images.amin(1, keepdim=True)
    divisor = torch.where(chroma == 0, 1.0, chroma)
    of_green, of_blue = (blue - red).div_(divisor).add_(2), (red - green).div_(divisor).add_(4)
    hue = torch.where(value == red, (green - blue).div_(divisor), torch.where(value == green, of_green, of_blue))
    hue = hue.add_(over_pixels(shifts))
    result = torch.empty_like(images)
    for channel, offset in enumerate((5, 3, 1)):
        distance = (hue + offset).remainder_(6)
        share = torch.minimum(distance, 4 - distance).clamp_(0, 1)
        result[:, channel : channel + 1] = value - share.mul_(chroma)
    return torch.where(over_pixels(shifts != 0), result, images)
