"""Synthetic images: learnable, of the size of the model's input; each image is a pure function of its index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from accel_train.config.schema import Data
from accel_train.data.sources.splits import Splits

CLASSES = 10
TRAIN_IMAGES, TEST_IMAGES = 2048, 512
"""Unless --data.train-limit and --data.test-limit say another number."""
GRID = 4  # the pattern of a class has GRID x GRID fields
FIRST_TEST = 2**31  # test images are numbered from here on, so that they differ from training images
# Two noises with coprime periods: up to A * B = 4.3e9 images have different pairs of offsets in them.
NOISE_A, NOISE_B, STRIDE = 65537, 65539, 40503


class Synthetic:
    """Images that are the sum of a pattern and noise. Sample i has class i mod CLASSES; its noise follows from i.

    Pattern (0..127) and two noises (0..64 each) fill 0..255. There is no clipping and no floating-point arithmetic, so
    the pixels are the same on any machine.
    """

    in_memory = True

    def __init__(self, split: str, first: int, count: int, channels: int, size: int) -> None:
        self.split, self.first, self.channels, self.size = split, first, channels, size
        self.labels = torch.arange(count, dtype=torch.int64) % CLASSES
        numbers = np.random.RandomState(0)  # its numbers never change, unlike those of newer generators
        patterns = numbers.randint(0, 128, (CLASSES, channels, GRID, GRID), dtype=np.uint8)
        self.patterns = torch.from_numpy(patterns)
        pixels = channels * size**2
        self.noise_a, self.noise_b = (
            torch.from_numpy(np.resize(numbers.randint(0, 65, period, dtype=np.uint8), period + pixels))
            for period in (NOISE_A, NOISE_B)
        )

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, ids: Sequence[int]) -> torch.Tensor | list[torch.Tensor]:
        field = torch.arange(self.size) * GRID // self.size
        images = self.patterns[self.labels[torch.as_tensor(ids, dtype=torch.int64)]]
        images = images.index_select(2, field).index_select(3, field)  # a copy: [b, C, H, W]
        numbers = self.first + torch.as_tensor(ids, dtype=torch.int64)
        for noise, period in ((self.noise_a, NOISE_A), (self.noise_b, NOISE_B)):
            windows = noise.unfold(0, self.channels * self.size**2, 1)  # a view: the noise from each offset on
            images += windows.index_select(0, numbers * STRIDE % period).view(images.shape)
        return images

    def name(self, id: int) -> str:
        return f"synthetic {self.split} image {id}"


def synthetic(data: Data, size: int) -> Splits:
    """Synthetic splits with the channels and as many images as `data` says, of `size` x `size` pixels.

    They do not depend on the run's seed.
    """
    return Splits(
        classes=tuple(str(label) for label in range(CLASSES)),
        channels=data.channels,
        image_size=size,
        mean=(0.5,) * data.channels,
        std=(0.18,) * data.channels,  # sqrt(128² / 12 + 2 · 65² / 12) / 255
        train=Synthetic("train", 0, data.train_limit or TRAIN_IMAGES, data.channels, size),
        validation=None,
        test=Synthetic("test", FIRST_TEST, data.test_limit or TEST_IMAGES, data.channels, size),
    )
