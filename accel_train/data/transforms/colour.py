"""Colour jitter, greyscale and Gaussian blur of a batch on the device.

The result for an image depends on its own pixels and parameters alone, to the last bit, whatever else the batch
contains. So nothing here is a matrix product, a convolution or a mean of floats: these add in an order that depends on
the batch's size. Each product and each sum is an operation of its own, because one processor fuses them and another
does not.

Pixels are floats from 0 to 255, which are not rounded between the steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train.config.schema import Augment
from accel_train.data.transforms.parameters import BLUR_RADIUS, SLOTS, Column, Jitter, jitter_strengths, over_pixels

CHUNK = 1 << 18  # numbers that a CPU changes at a time: they fit into its cache


def change_colours(images: Tensor, parameters: Tensor, augment: Augment) -> Tensor:
    """Jittered, grey and blurred images, a new float32 tensor [b, C, H, W]. `parameters`: see AugmentParameters."""
    images = images.to(torch.float32, copy=True)
    strengths = jitter_strengths(augment)
    if any(strengths):
        kinds = parameters[:, Column.KIND : Column.KIND + SLOTS]
        factors = parameters[:, Column.FACTOR : Column.FACTOR + SLOTS].view(torch.float32)
        hues = parameters[:, Column.HUE].view(torch.float32)
        hue = strengths[Jitter.HUE] > 0
        slots = SLOTS if hue else SLOTS // 2

        def jitter(images: Tensor, kinds: Tensor, factors: Tensor, hues: Tensor) -> Tensor:
            for slot in range(slots):
                if slot == SLOTS // 2:
                    images = _shift_hue(images, hues)
                images = _blend(images, kinds[:, slot], factors[:, slot])
            return images

        active = (factors != 1).any(1) | (hues != 0)
        images = _where(active, jitter, images, kinds, factors, hues)
    if augment.grey > 0:
        grey = parameters[:, Column.GREY] > 0
        images = _where(grey, lambda images, grey: torch.where(over_pixels(grey), _grey(images), images), images, grey)
    if augment.blur > 0:
        kernels = parameters[:, Column.KERNEL : Column.KERNEL + BLUR_RADIUS + 1].view(torch.float32)
        images = _where(kernels[:, 0] != 1, _blur, images, kernels)
    return images


def _where(active: Tensor, change: Callable[..., Tensor], images: Tensor, *parameters: Tensor) -> Tensor:
    """`images`, changed where `active` (bool [b]). `change` takes images and their rows of `parameters`.

    A GPU changes all images, since it would have to wait for the number of active ones: the parameters of the others
    change nothing.
    """
    if images.device.type != "cpu":
        return change(images, *parameters)
    at_once = max(1, CHUNK // images[0].numel())
    numbers = active.nonzero()[:, 0]
    for start in range(0, len(numbers), at_once):
        rows = numbers[start : start + at_once]
        images[rows] = change(images[rows].contiguous(), *(values[rows] for values in parameters))
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


def _blur(images: Tensor, kernels: Tensor) -> Tensor:
    """Blurred images, reflected at the edge. `kernels`: float32 [b, radius + 1], from the centre outwards."""
    for dim in (2, 3):
        length = images.shape[dim]
        radius = min(BLUR_RADIUS, length - 1)
        padded = F.pad(images, (0, 0, radius, radius) if dim == 2 else (radius, radius, 0, 0), mode="reflect")
        images = images.mul(over_pixels(kernels[:, 0]))
        for distance in range(1, radius + 1):
            before, after = (padded.narrow(dim, radius + side * distance, length) for side in (-1, 1))
            images.add_((before + after).mul_(over_pixels(kernels[:, distance])))
    return images
