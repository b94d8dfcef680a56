"""Models that no library has, for tests with real processes: `--model.name tests/odd_models.py:NAME`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SharedNorm(nn.Module):
    """A BatchNorm that is called for the images and for the same images on another scale, one over learned prototypes,
    and two layers that are never called."""

    def __init__(self, num_classes: int, in_chans: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(in_chans, 8, 3, stride=2), nn.BatchNorm2d(8)
        self.prototypes, self.norm_of_prototypes = nn.Parameter(torch.randn(num_classes, 8)), nn.BatchNorm1d(8)
        self.unused, self.unused_norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, images: Tensor) -> Tensor:
        scales = [self.norm(self.conv(images * scale)).relu().mean((2, 3)) for scale in (1.0, 0.3)]
        logits: Tensor = torch.stack(scales).sum(0) @ self.norm_of_prototypes(self.prototypes).t()
        return logits


class Experts(nn.Module):
    """Each sample goes to one of four experts, by its brightness: a pass may leave some of them out."""

    def __init__(self, num_classes: int, in_chans: int) -> None:
        super().__init__()
        self.classes = num_classes
        self.experts = nn.ModuleList(nn.Linear(in_chans * 16, num_classes) for _ in range(4))

    def forward(self, images: Tensor) -> Tensor:
        features = nn.functional.adaptive_avg_pool2d(images, 4).flatten(1)
        choice = (features.mean(1) * 1000).long() % len(self.experts)
        logits: Tensor = features.new_zeros(len(features), self.classes)
        for number, expert in enumerate(self.experts):
            chosen = choice == number
            if chosen.any():
                logits = logits.index_put((chosen.nonzero()[:, 0],), expert(features[chosen]))
        return logits


class Centred(nn.Module):
    """Subtracts a running mean, as many write it: each pass puts another tensor in the place of the buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * images.mean().detach()
        return images - self.mean


class Restless(nn.Module):
    """Each forward pass of training leaves out one of three blocks, and changes a buffer."""

    def __init__(self, num_classes: int, in_chans: int) -> None:
        super().__init__()
        self.norm = Centred()
        self.blocks = nn.ModuleList(nn.Linear(in_chans * 16, in_chans * 16) for _ in range(3))
        self.head = nn.Linear(in_chans * 16, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = nn.functional.adaptive_avg_pool2d(self.norm(images), 4).flatten(1)
        skipped = int(torch.randint(3, ()).item()) if self.training else None
        for number, block in enumerate(self.blocks):
            if number != skipped:
                features = features + block(features).relu()
        logits: Tensor = self.head(features)
        return logits
