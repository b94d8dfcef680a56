"""What erased boxes are filled with: --augment.erase-mode, as timm's random erasing names the modes.

Random colours are normal numbers, as in timm, in the units of normalised pixels. Each follows from the sample's key and
its own place, and from a table, so that it has the same bits on every device and in every batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accel_train.data.transforms.parameters import Column, Stream
from accel_train.keyed import GOLDEN, scramble, shift, signed

BITS = 16  # of a normal number
CHUNK = 1 << 21  # pixels that are drawn at a time


class Erasing:
    """Erases the box of each image of a batch."""

    def __init__(self, mode: str, device: torch.device) -> None:
        """`mode`: augment.erase-mode."""
        self.mode = mode
        if self.mode != "const":
            middles = (torch.arange(1 << BITS, dtype=torch.float64) + 0.5) / (1 << BITS)
            self.normal = torch.special.ndtri(middles).float().to(device)

    def __call__(self, images: Tensor, batch: dict[str, Tensor], masks: Tensor) -> None:
        """Erase in `images`, normalised float32 [b, C, size, size], in place. `batch`: "parameters" and, unless the
        mode is const, "keys", int64 [b]. `masks`: of the boxes, bool [b, 1, size, size]."""
        if self.mode == "const":
            images.masked_fill_(masks, 0.0)  # the mean colour
            return
        which = torch.arange(len(images), device=images.device)
        if images.device.type == "cpu":
            which = (batch["parameters"][:, Column.LAST] >= 0).nonzero()[:, 0]  # the others would not change
        step = max(1, CHUNK // images[0].numel())
        for start in range(0, len(which), step):
            rows = which[start : start + step]
            images[rows] = torch.where(masks[rows], self._noise(batch["keys"][rows], images), images[rows])

    def _noise(self, keys: Tensor, images: Tensor) -> Tensor:
        """Normal numbers for each sample's box, float32 [b, C, size, size], or [b, C, 1, 1] of its colour."""
        shape = images.shape[1:] if self.mode == "pixel" else (images.shape[1], 1, 1)
        count = shape[0] * shape[1] * shape[2]
        own = scramble(keys + signed((Stream.ERASE_NOISE + 1) * GOLDEN))
        places = torch.arange(1, 1 + count, device=keys.device)
        words = scramble(own[:, None] + places * signed(GOLDEN))
        noise: Tensor = self.normal[shift(words, 64 - BITS)].view(-1, *shape)
        return noise
