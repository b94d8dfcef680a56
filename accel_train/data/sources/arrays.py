"""Small published datasets kept in memory as arrays: the digits of the package, and torchvision's."""

from __future__ import annotations

import gzip
import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accel_train.config.schema import Data
from accel_train.data.sources.divide import stratified_choice
from accel_train.data.sources.splits import Splits, subset
from accel_train.errors import UserError, one_line

DIGITS = Path(__file__).with_name("digits.csv.gz")


@dataclass
class ArraySource:
    """A source whose images are in memory, as `pixels`: uint8 [n, C, H, W], or float32 of a user's own data."""

    label: str
    """The split's name in messages, such as "mnist train"."""
    pixels: torch.Tensor
    labels: torch.Tensor
    in_memory: bool = True

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, ids: Sequence[int]) -> torch.Tensor | list[torch.Tensor]:
        return self.pixels.index_select(0, torch.as_tensor(ids, dtype=torch.int64))

    def name(self, id: int) -> str:
        return f"{self.label} image {id}"


def all_digits() -> ArraySource:
    """1797 handwritten digits of 8x8 pixels: the test part of optdigits.

    E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998, doi
    10.24432/C50P49, CC BY 4.0. The file is scikit-learn's (`load_digits`): the quick start has the same data whatever
    version of it is installed, and does not wait for its imports, which are a fifth of all.
    """
    with gzip.open(DIGITS) as lines:
        table = np.loadtxt(lines, delimiter=",")  # 64 pixels from 0 to 16, and the class
    pixels = torch.from_numpy((table[:, :-1] * (255 / 16)).round().astype(np.uint8)).view(-1, 1, 8, 8)
    return ArraySource("digits", pixels, torch.from_numpy(table[:, -1].astype(np.int64)))


def digits() -> Splits:
    """The digits. A fifth of the images of each class is the test split: always the same ones, whatever the seed."""
    whole = all_digits()
    test = stratified_choice(map(str, range(len(whole))), whole.labels.numpy(), round(len(whole) / 5), "digits test")
    return Splits(
        classes=tuple("0123456789"),
        channels=1,
        image_size=8,
        mean=(0.3050,),  # computed from the training images
        std=(0.3759,),
        train=subset(whole, ~test),
        validation=None,
        test=subset(whole, test),
    )


@dataclass(frozen=True)
class PublishedSet:
    """A dataset of torchvision, with its usual normalisation."""

    kind: str
    """The class in torchvision.datasets."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Of the training images, as usually published."""
    size: int
    """Height and width of an image."""
    classes: int
    train_images: int


PUBLISHED = {
    "mnist": PublishedSet("MNIST", (0.1307,), (0.3081,), 28, 10, 60_000),
    "fashion_mnist": PublishedSet("FashionMNIST", (0.2860,), (0.3530,), 28, 10, 60_000),
    "kmnist": PublishedSet("KMNIST", (0.1918,), (0.3483,), 28, 10, 60_000),
    "cifar10": PublishedSet("CIFAR10", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), 32, 10, 50_000),
    "cifar100": PublishedSet("CIFAR100", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), 32, 100, 50_000),
}


def torchvision_set(name: str, root: Path, *, download: bool = True) -> Splits:
    """One of PUBLISHED, from files in `root`; missing files are downloaded to it. Raises UserError."""
    import torchvision.datasets

    published = PUBLISHED[name]
    kind = getattr(torchvision.datasets, published.kind)
    splits = _load(kind, name, root)
    if splits is None and not download:
        raise UserError(
            f"the dataset '{name}' is not in {root} yet; training downloads it, and so does evaluate with "
            f"--data.root {root}."
        )
    if splits is None:
        _download(kind, name, root)
        splits = _load(kind, name, root)
    if splits is None:
        raise UserError(f"the files of '{name}' in {root} are damaged; delete them, and they will be downloaded again.")
    return replace(splits, mean=published.mean, std=published.std)


def _load(kind: Any, name: str, root: Path) -> Splits | None:
    """The dataset without mean and std, or None if files are missing or truncated."""
    try:
        train, test = kind(root, train=True), kind(root, train=False)
    except (RuntimeError, AssertionError, ValueError, EOFError):  # missing or truncated
        return None
    sources = []
    for split, dataset in (("train", train), ("test", test)):
        pixels = torch.as_tensor(dataset.data)  # [n, H, W], or [n, H, W, 3]
        pixels = pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()
        labels = torch.as_tensor(dataset.targets).long()
        if len(pixels) != len(labels):
            return None
        sources.append(ArraySource(f"{name} {split}", pixels, labels))
    channels, size = sources[0].pixels.shape[1:3]
    return Splits(tuple(train.classes), channels, size, (), (), sources[0], None, sources[1])


def _download(kind: Any, name: str, root: Path) -> None:
    """Download one of torchvision's datasets: one process downloads all files or none, the others wait.

    They wait for a file lock and not at a barrier, which would time out during a long download.
    """
    from filelock import FileLock

    if hasattr(kind, "resources"):
        archives = [f"{kind.__name__}/raw/{file}" for file, _ in kind.resources]
    else:
        archives = [kind.filename]
    timeout = socket.getdefaulttimeout()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (
            FileLock(root / f".{name}.lock"),
            tempfile.TemporaryDirectory(prefix=".download-", dir=root) as aside,
        ):
            if _load(kind, name, root) is not None:
                return  # another process has downloaded it
            for archive in archives:  # copied by hand to a machine without a network
                if (root / archive).exists():
                    (Path(aside) / archive).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(root / archive, Path(aside) / archive)
            socket.setdefaulttimeout(30)  # seconds; if a firewall drops packets, urllib would wait for ever
            kind(aside, train=True, download=True)
            for file in sorted(Path(aside).rglob("*")):
                if file.is_file():
                    target = root / file.relative_to(aside)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    file.replace(target)
    except (OSError, RuntimeError, AssertionError, ValueError, EOFError) as error:
        reason = one_line(" ".join(str(error).split()), 200)
        raise UserError(
            f"the dataset '{name}' is not in {root} and could not be downloaded ({reason}). "
            f"Without a network, put {', '.join(archives)} into {root}, as published."
        ) from error
    finally:
        socket.setdefaulttimeout(timeout)


# Synthetic images: learnable, of the size of the model's input; each image is a pure function of its index.


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
