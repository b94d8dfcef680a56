"""The data and the net of torture.py, which all programs share. The net writes down what it really learns from.

No program is asked what it did. In each process the net recognises the images that it gets by their pixels; a gradient
that comes back to their logits means that they are learned from. In the process of rank 0 it also takes a fingerprint
of the weights before the first step of the optimizer and after each one: so it shows from which moment of the past a
program that was started again goes on.

Environment: TORTURE_LOG, an empty folder for the records of this start (without it nothing is observed); TORTURE_MNIST,
a folder with MNIST in torchvision's layout (without it: scikit-learn's digits).
"""

from __future__ import annotations

import atexit
import copy
import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from accel_train.data.sources.arrays import ArraySource, all_digits
from accel_train.data.sources.splits import Splits

RECIPE = yaml.safe_load(Path(__file__).with_name("recipe.yaml").read_text())
BATCH: int = RECIPE["batch_size"]  # of all processes together
EPOCHS: int = RECIPE["epochs"]
SAVE_EVERY: int = RECIPE["checkpoint"]["every_updates"]
SEED: int = RECIPE["seed"]
LEARNING_RATE: float = RECIPE["optim"]["lr"]
MOMENTUM: float = RECIPE["optim"]["momentum"]
MEAN, STD = 0.5, 0.5
LOG, MNIST = "TORTURE_LOG", "TORTURE_MNIST"

epoch: int | None = None
"""Which one it is, from 0, as a program says; accel_train says nothing, and its epochs are counted."""


@functools.cache  # the data and the net both ask for them
def images_and_labels() -> tuple[Tensor, Tensor]:
    """The training images uint8 [n, 1, H, W], all different, and their labels int64 [n]; n is a multiple of BATCH.

    So no program pads or drops a batch: whatever is missing or doubled, an interruption did it.
    """
    if MNIST in os.environ:
        import torchvision

        published = torchvision.datasets.MNIST(os.environ[MNIST], train=True)
        pixels, labels, count = published.data[:, None], published.targets, 100 * BATCH
    else:
        whole = all_digits()
        pixels, labels, count = whole.pixels, whole.labels, 30 * BATCH
    first = {image.numpy().tobytes(): number for number, image in reversed(list(enumerate(pixels)))}
    kept = sorted(first.values())[:count]
    return pixels[kept].clone(), labels[kept].clone()


def normalised(pixels: Tensor) -> Tensor:
    """What the net takes: float32, from -1 to 1."""
    return (pixels.float() / 255 - MEAN) / STD


def data() -> Splits:
    """The same data as accel_train wants it. Its test images are the last batch again: the race is not about them."""
    pixels, labels = images_and_labels()
    train = ArraySource("train", pixels, labels)
    test = ArraySource("test", pixels[-BATCH:], labels[-BATCH:])
    return Splits(tuple("0123456789"), 1, pixels.shape[-1], (MEAN,), (STD,), train, None, test)


def net() -> nn.Module:
    """Two convolutions, dropout and two dense layers; a million weights, so that a save takes some time."""
    pixels, labels = images_and_labels()
    side = pixels.shape[-1] // 2
    layers = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 64, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * side**2, 1_000_000 // (64 * side**2)),
        nn.ReLU(),
        nn.Linear(1_000_000 // (64 * side**2), 10),
    )
    return Observed(layers, pixels, labels) if LOG in os.environ else layers


class Observed(nn.Module):
    """The layers, and a record for each process: a file with a line of JSON for each thing that it sees."""

    def __init__(self, layers: nn.Module, pixels: Tensor, labels: Tensor) -> None:
        super().__init__()
        self.layers = layers
        self._labels = labels.tolist()
        self._numbers = {image.numpy().tobytes(): number for number, image in enumerate(pixels)}
        self._folder, self._file = Path(os.environ[LOG]), -1
        self._steps, self._has_learned = 0, False
        register_optimizer_step_pre_hook(lambda *_: self._before_step())
        register_optimizer_step_post_hook(lambda *_: self._after_step())

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        if self.training and logits.requires_grad:
            shown, values = images.detach(), logits.detach()
            logits.register_hook(lambda gradient: self._learned(shown, values, gradient))  # type: ignore[no-untyped-call]
        return logits

    def _learned(self, images: Tensor, logits: Tensor, gradient: Tensor) -> None:
        """Write which images the gradient is of, before the step: when rank 0 has stepped, all ranks have written."""
        real = gradient.flatten(1).any(1)  # padding has no gradient
        pixels = ((images[real] * STD + MEAN) * 255).round().to(torch.uint8)
        known = [self._numbers.get(image.contiguous().numpy().tobytes()) for image in pixels]
        numbers = [number for number in known if number is not None]
        if not numbers:  # a rehearsal with blank images, whose gradient is thrown away
            return
        if len(numbers) < len(known):
            raise ValueError("The net was given images that are not of the training data.")
        labels = torch.tensor([self._labels[number] for number in numbers], dtype=torch.int64)
        loss = F.cross_entropy(logits[real], labels, reduction="sum").item()
        self._has_learned = True
        self._write(step=self._steps + 1, epoch=epoch, images=numbers, loss=loss)

    def _before_step(self) -> None:
        if self._steps == 0 and _rank() == 0:  # a closure, as Lightning's, computes the gradient only after this
            self._before = (self._fingerprint(), copy.deepcopy(self.layers.state_dict()))

    def _after_step(self) -> None:
        if (
            not self._has_learned
        ):  # torch steps without a gradient, to create the state that a checkpoint is loaded into
            return
        self._steps, self._has_learned = self._steps + 1, False
        if _rank() != 0:
            return
        if self._steps == 1:
            fingerprint, weights = self._before
            torch.save(weights, self._folder / "before.pt")
            self._write(before=fingerprint)
            atexit.register(lambda: torch.save(self.layers.state_dict(), self._folder / "after.pt"))
        self._write(done=self._steps, after=self._fingerprint())

    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for weights in self.layers.parameters():
            digest.update(weights.detach().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def _write(self, **what: Any) -> None:
        if self._file < 0:
            path = self._folder / f"rank{_rank()}.jsonl"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(self._file, f"{json.dumps(what)}\n".encode())  # one call, so that a SIGKILL leaves a whole line


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
