"""Models that no library has, for tests with real processes: `--model.name tests/odd_models.py:NAME`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class SharedNorm(nn.Module):
    """A BatchNorm that is called for the images and for the same images on another scale, and two layers that are never
    called."""

    def __init__(self, num_classes: int, in_chans: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(in_chans, 8, 3, stride=2), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, num_classes)
        self.unused, self.unused_norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, images: Tensor) -> Tensor:
        scales = [self.norm(self.conv(images * scale)).relu().mean((2, 3)) for scale in (1.0, 0.3)]
        logits: Tensor = self.head(torch.stack(scales).sum(0))
        return logits


class Prototypes(nn.Module):
    """A BatchNorm over learned prototypes of the classes, whose number is not that of the samples."""

    def __init__(self, num_classes: int, in_chans: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(in_chans, 8, 3, stride=2), nn.BatchNorm1d(8)
        self.prototypes = nn.Parameter(torch.randn(num_classes, 8))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.conv(images).relu().mean((2, 3)) @ self.norm(self.prototypes).t()
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


class TwoViews(nn.Module):
    """Two views of each image go through one BatchNorm: first all images, then all of them mirrored."""

    def __init__(self, num_classes: int, in_chans: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(in_chans, 8, 3, stride=2), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.norm(self.conv(torch.cat([images, images.flip(-1)]))).relu().mean((2, 3))
        logits: Tensor = self.head(sum(features.chunk(2)))
        return logits


class Capacity(nn.Module):
    """Four experts of a limited capacity: whether one takes a sample depends on the samples before it."""

    def __init__(self, num_classes: int, in_chans: int, limited: bool = True) -> None:
        super().__init__()
        self.classes, self.limited = num_classes, limited
        self.gate = nn.Linear(in_chans * 16, 4)
        self.experts = nn.ModuleList(nn.Linear(in_chans * 16, num_classes) for _ in range(4))

    def forward(self, images: Tensor) -> Tensor:
        features = nn.functional.adaptive_avg_pool2d(images, 4).flatten(1)
        weight, choice = self.gate(features).softmax(1).max(1)
        logits: Tensor = features.new_zeros(len(features), self.classes)
        for number, expert in enumerate(self.experts):
            chosen = (choice == number).nonzero()[:, 0]
            if self.limited and self.training:
                chosen = chosen[: max(1, int(1.25 * len(features) / 4))]
            if len(chosen):
                logits = logits.index_put((chosen,), expert(features[chosen]) * weight[chosen, None])
        return logits


class Recomputed(nn.Module):
    """Two parts that are computed again in the backward pass, with dropout as a function, or with a shared layer."""

    def __init__(self, num_classes: int, in_chans: int, shared: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(in_chans * 16, in_chans * 16) for _ in range(2))
        self.drop, self.shared = nn.Dropout(0.2), shared
        self.head = nn.Linear(in_chans * 16, num_classes)

    def _part(self, values: Tensor, layer: nn.Module) -> Tensor:
        values = layer(values)
        dropped = self.drop(values) if self.shared else nn.functional.dropout(values, 0.2, self.training)
        result: Tensor = layer(dropped).relu()
        return result

    def forward(self, images: Tensor) -> Tensor:
        features = nn.functional.adaptive_avg_pool2d(images, 4).flatten(1)
        for layer in self.layers:
            features = checkpoint(self._part, features, layer, use_reentrant=False)
        logits: Tensor = self.head(features)
        return logits


class Initialised(nn.Module):
    """The first pass of training sets a parameter by its images (ActNorm)."""

    def __init__(self, num_classes: int, in_chans: int) -> None:
        super().__init__()
        self.bias, self.is_set = nn.Parameter(torch.zeros(in_chans)), False
        self.head = nn.Linear(in_chans, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = images.mean((2, 3))
        if self.training and not self.is_set:
            with torch.no_grad():
                self.bias.copy_(-features.mean(0))
            self.is_set = True
        logits: Tensor = self.head(features + self.bias)
        return logits
