"""The two tasks that are measured: data, net and optimizer, as tutorials write them.

Every script here takes the same options and prints a line of JSON every few updates (--every):

    python benchmarks/tutorial.py mnist_cnn --data-root ~/data
    python benchmarks/tutorial.py cifar10_resnet18 --workers 2 --every 4 --updates 16
    python benchmarks/tutorial.py mnist_cnn --seed 3 --evaluate   # and a line with the test accuracy of each epoch

Without --data-root the images are synthetic, of the same shapes. Each access makes a PIL image, as in torchvision's own
MNIST and CIFAR10.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torchvision
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from torchvision import transforms

from accel_train.config.schema import Data
from accel_train.data.sources.arrays import synthetic
from accel_train.tools.bench import Clock

TEST_BATCH = 1000  # as in PyTorch's MNIST example


@dataclass(frozen=True)
class Task:
    """What a recipe of accel_train learns, for scripts that do not use accel_train."""

    batch_size: int
    every: tuple[int, int]
    """Updates of a turn, which takes half a second: on two CPU cores, and on a GPU."""
    kind: Any
    """The class in torchvision.datasets."""
    channels: int
    size: int
    images: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def transform(self) -> transforms.Compose:
        return transforms.Compose([transforms.ToTensor(), transforms.Normalize(self.mean, self.std)])

    def root(self, folder: Path | None) -> Path | None:
        """Return `folder` if it contains the published dataset; else None, which means synthetic images."""
        try:
            self.kind(folder, train=True)
        except (RuntimeError, TypeError):  # TypeError: no folder
            return None
        return folder

    def dataset(
        self, root: Path | None, transform: Any, *, train: bool = True, images: int | None = None
    ) -> Dataset[Any]:
        """Return the training or test split; `images`: only so many, the first."""
        data: Any = Drawn(self, transform, train) if root is None else self.kind(root, train=train, transform=transform)
        data.data, data.targets = data.data[:images], data.targets[:images]
        return data


TASKS = {
    "mnist_cnn": Task(64, (10, 500), torchvision.datasets.MNIST, 1, 28, 60_000, (0.1307,), (0.3081,)),
    "cifar10_resnet18": Task(
        256, (2, 50), torchvision.datasets.CIFAR10, 3, 32, 50_000, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    ),
}


class Drawn(Dataset[Any]):
    """Synthetic images instead of a published dataset: arrays in memory, a PIL image for each access."""

    def __init__(self, task: Task, transform: Any, train: bool) -> None:
        splits = synthetic(Data(name="synthetic", channels=task.channels, train_limit=task.images), task.size)
        source = splits.train if train else splits.test
        assert source is not None
        pixels = source.fetch(range(len(source.labels)))
        assert isinstance(pixels, torch.Tensor)
        self.data = pixels.permute(0, 2, 3, 1).squeeze(-1).contiguous().numpy()
        self.targets = source.labels.tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(Image.fromarray(self.data[index])), self.targets[index]


def net(name: str) -> nn.Module:
    """Return the net as tutorials write it: PyTorch's basic MNIST example, torchvision's ResNet-18."""
    if name == "cifar10_resnet18":
        return torchvision.models.resnet18(num_classes=10)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def torch_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer as tutorials create it: torch's own, with its default settings."""
    if name == "mnist_cnn":
        return torch.optim.Adadelta(model.parameters(), lr=1.0)
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def decay(name: str, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    """Return the schedule, stepped at the end of each epoch: PyTorch's MNIST example's; for the ResNet a constant."""
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7 if name == "mnist_cnn" else 1.0)


def best_device() -> torch.device:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device or torch.device("cpu")


def has_lightning() -> bool:
    """Return whether Lightning is installed, and say so if it is not."""
    if importlib.util.find_spec("lightning"):
        return True
    print("Lightning takes no part, because it is not installed: pip install 'accel-train[bench]'")
    return False


def environment() -> dict[str, str]:
    """Return the environment without OpenMP's variables, so that each program chooses its threads and how they wait."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}


def turn(task: Task) -> int:
    """Return the number of updates of a turn on this machine."""
    return task.every[best_device().type != "cpu"]


def arguments(description: str, *, tests: bool = True) -> argparse.ArgumentParser:
    """Return the parser of a script; `tests`: it can measure the test accuracy of a training with a seed."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--data-root", type=Path, help="folder of torchvision's dataset; default: synthetic images")
    parser.add_argument("--workers", type=int, default=0, help="worker processes that load images (default: 0)")
    parser.add_argument("--every", type=int, help="updates between two lines (default: as many as take half a second)")
    parser.add_argument("--updates", type=int, help="stop after so many updates (default: run until stopped)")
    if tests:
        parser.add_argument("--images", type=int, help="use only the first images of the training data (default: all)")
        parser.add_argument("--seed", type=int, help="of the weights and the order (default: another one each time)")
        parser.add_argument("--evaluate", action="store_true", help="measure the test accuracy after each epoch")
    return parser


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Task]:
    options = parser.parse_args()
    task = TASKS[options.task]
    options.every = options.every or turn(task)
    return options, task


def epochs(length: int, updates: int | None) -> Iterator[tuple[int, int | None]]:
    """Yield the number of each epoch, from 0, and how many of its `length` batches to train on; None: all.

    It ends when there were `updates` in all; None: never.
    """
    for epoch in count():
        left = None if updates is None else updates - epoch * length
        if left is not None and left <= 0:
            return
        yield epoch, left


def tell_accuracy(epoch: int, accuracy: float) -> None:
    """Print the accuracy on the test images after `epoch` epochs, between 0 and 1, as a line of JSON."""
    print(json.dumps({"epoch": epoch, "accuracy": round(accuracy, 4)}), flush=True)


class Progress:
    """Prints a line of JSON every `every` updates: {"update": how many, "images_per_second": since the last line}."""

    def __init__(self, task: Task, every: int) -> None:
        self.images, self.every, self.update = every * task.batch_size, every, 0
        self.clock = Clock(best_device())
        self.clock.start()

    def advance(self, updates: int = 1) -> None:
        self.update += updates
        if self.update % self.every == 0:
            rate = self.images / self.clock.stop()
            print(json.dumps({"update": self.update, "images_per_second": round(rate, 1)}), flush=True)
            self.clock.start()
