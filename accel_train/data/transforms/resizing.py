"""Resizes images: by torch, or by Pillow where torch cannot, with the same pixels in training and evaluation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train.config.declaration import PILLOWS_OWN


def sides(height: int, width: int, short_side: int) -> tuple[int, int]:
    """Height and width of an image resized to this short side, rounded as in torchvision's Resize."""
    short = min(height, width)
    return int(short_side * height / short), int(short_side * width / short)


def resized_to_short_side(image: Tensor, short_side: int) -> Tensor:
    """`image`, uint8 [C, H, W], resized so that the shorter of its sides has `short_side` pixels.

    The pixels are those of torchvision's Resize in 0.29. Older versions of it computed in float32 on some CPUs, so that
    pixels differed by 1.
    """
    return resized(image, *sides(image.shape[1], image.shape[2], short_side))


def resized(image: Tensor, height: int, width: int, interpolation: str = "bilinear") -> Tensor:
    """`image`, uint8 [C, H, W] on the CPU, resized to uint8 [C, height, width] with antialiasing (but nearest)."""
    if image.shape[1:] == (height, width):
        return image
    if interpolation in PILLOWS_OWN:
        return resized_by_pillow(image, height, width, interpolation)
    # image[None] would not count as channels last, and interpolate would copy the pixels twice.
    batch = image.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
    return F.interpolate(batch, (height, width), mode=interpolation, antialias=True)[0]


def resized_by_pillow(images: Tensor, height: int, width: int, interpolation: str) -> Tensor:
    """`images`, uint8 or float32 [..., H, W], resized to [..., height, width] by Pillow, on the CPU; returned on the
    device and with the type that they have."""
    from PIL import Image

    kernel = Image.Resampling[interpolation.upper()]
    planes = images.cpu().flatten(0, -3)  # Pillow resizes each channel by itself, too
    resized = [Image.fromarray(plane.numpy()).resize((width, height), kernel) for plane in planes]
    stacked = torch.stack([torch.frombuffer(bytearray(plane.tobytes()), dtype=images.dtype) for plane in resized])
    return stacked.view(*images.shape[:-2], height, width).to(images.device)
