"""What is done to one image at a time, in the worker processes: crop, resize and torchvision's policies.

Images come and go as uint8, so that a worker moves a quarter of the bytes; what can be done to a whole batch at once
(flip, normalisation, erasing, mixing) waits for the device, in augment.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.transforms import v2

from accel_train import config


def resize_default(size: int) -> int:
    """Short side from which an input of `size` pixels is cut: 256 for 224, as evaluations of ImageNet do."""
    return round(size / 0.875)


class ImageTransform:
    """Turns images of any size into one uint8 tensor [b, C, size, size].

    In training, what is random about an image follows from its key alone: torchvision's own transforms draw from
    torch's CPU generator, which is seeded with the key, for this image only, and put back as it was.
    """

    def __init__(self, augment: config.Augment, size: int, *, training: bool) -> None:
        self.training = training
        resize = v2.Resize(augment.resize or resize_default(size), antialias=True)
        steps: list[torch.nn.Module] = []
        if training and augment.crop == "resized":
            steps.append(v2.RandomResizedCrop(size, scale=augment.scale, ratio=augment.ratio, antialias=True))
        elif training and augment.crop == "random":
            steps += [resize, v2.RandomCrop(size, padding=augment.pad or None, pad_if_needed=True)]
        else:
            steps += [resize, v2.CenterCrop(size)]
        if training and augment.policy == "randaugment":
            steps.append(v2.RandAugment(augment.randaugment_ops, augment.randaugment_magnitude))
        elif training and augment.policy == "trivialaugment":
            steps.append(v2.TrivialAugmentWide())
        self.steps = torch.nn.Sequential(*steps)

    def __call__(self, images: Sequence[Tensor], keys: Tensor) -> Tensor:
        """`images`: uint8 [C, H, W] each; `keys`: int64 [b]. Returns uint8 [b, C, size, size]."""
        if not self.training:
            return torch.stack([self.steps(image) for image in images])
        turned = []
        with torch.random.fork_rng(devices=[]):
            for image, word in zip(images, keys.tolist(), strict=True):
                torch.default_generator.manual_seed(word)  # torch.manual_seed would seed the GPUs', too
                turned.append(self.steps(image))
        return torch.stack(turned)
