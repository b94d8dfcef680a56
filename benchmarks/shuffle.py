"""How far --data.order shards is from a full shuffle: the order itself, and what models learn from it.

    python benchmarks/shuffle.py --data-root DIR             # MNIST, which is downloaded if it is not in DIR
    python benchmarks/shuffle.py --data-root DIR --photos petimages.tar

The shards are sorted by class, which is the worst that they can be; "mixed": with their images in random order, as
`accel-train shards` writes them. The first table is about a data set like ImageNet: 1281 shards of 1000 images. The
distances are those, in an epoch, of two images that are neighbours in a shard, as a fraction of the epoch. The second
table has the test accuracies of several seeds: a small net with BatchNorm, trained on real images in small shards.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import math
import statistics
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.datasets import MNIST

from accel_train.api import train
from accel_train.cli.table import print_table
from accel_train.data.order.plan import Plan
from accel_train.data.order.samplers import ShardOrder, ShardSampler, ShardTable, TrainingSampler

# How the rows are named: open shards of each canonical node, and canonical nodes; None: the full shuffle.
ORDERS: dict[str, tuple[int, int] | None] = {
    "full": None,
    "64 x 8": (64, 8),
    "16 x 8": (16, 8),
    "4 x 8": (4, 8),
    "1 x 8": (1, 8),
    "1 x 1": (1, 1),
}
MIXED = ("full", "16 x 8", "1 x 8")
TRAINED = ("full", "16 x 8", "4 x 8", "1 x 8", "1 x 1")
Images = tuple[list[bytes], npt.NDArray[np.int64]]
"""Encoded images, and their labels."""


def sampler_of(order: tuple[int, int] | None, numbers: Tensor, batch_size: int) -> TrainingSampler:
    """`numbers`: int64 [n], the shard of each sample."""
    if order is None:
        return TrainingSampler(Plan(len(numbers), batch_size, 1, 1), 0)
    open_shards, nodes = order
    plan = Plan(len(numbers), batch_size, 1, 1, canonical_nodes=nodes)
    return ShardSampler(plan, ShardOrder(ShardTable.of(numbers), plan, seed=0, open_shards=open_shards))


def figures(order: tuple[int, int] | None, *, sorted_by_class: bool, virtual_batch: int = 32) -> list[str]:
    """Of one epoch: quartiles of the distances, classes in a virtual batch, shards in an update and in 1/8 of it."""
    batch_size, of_shard, classes = 1024, 1000, 1000
    samples = 1281 * of_shard
    numbers = torch.arange(samples) // of_shard
    labels = torch.arange(samples) * classes // samples
    if not sorted_by_class:
        labels = labels[torch.randperm(samples, generator=torch.Generator().manual_seed(0))]
    ids = torch.cat([block.ids for block in sampler_of(order, numbers, batch_size).blocks()])[:samples]
    place = torch.empty(samples, dtype=torch.int64)
    place[ids] = torch.arange(samples)
    distances = place.diff().abs()[numbers[1:] == numbers[:-1]].double() / samples
    quartiles = "  ".join(f"{value:.3f}" for value in distances.quantile(torch.tensor([0.25, 0.5, 0.75]).double()))

    def distinct(values: Tensor, size: int) -> float:
        """The mean number of different values among `size` that follow each other."""
        rows = values[: len(values) // size * size].view(-1, size).sort().values
        return 1 + (rows.diff() != 0).sum().item() / len(rows)

    of_batch = distinct(labels[ids], virtual_batch)
    shards = distinct(numbers[ids], batch_size), distinct(numbers[ids], batch_size // 8)
    return [quartiles, f"{of_batch:.1f}", *(f"{value:.0f}" for value in shards)]


def write_shards(root: Path, split: str, images: Images, of_shard: int) -> None:
    """WebDataset shards of `images` in their order."""
    files, labels = images
    root.mkdir(parents=True, exist_ok=True)
    for first in range(0, len(files), of_shard):
        with tarfile.open(root / f"{split}-{first:06d}.tar", "w") as shard:
            for number in range(first, min(first + of_shard, len(files))):
                for extension, content in (("png", files[number]), ("cls", str(labels[number]).encode())):
                    member = tarfile.TarInfo(f"{number:06d}.{extension}")
                    member.size = len(content)
                    shard.addfile(member, io.BytesIO(content))


def encoded(pixels: npt.NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def mnist(root: Path) -> tuple[Images, Images]:
    """6,400 training images and 5,000 test images."""
    parts = []
    for is_train, count in ((True, 6_400), (False, 5_000)):
        data = MNIST(root, train=is_train, download=True)
        parts.append(([encoded(image) for image in data.data[:count].numpy()], data.targets[:count].numpy()))
    return parts[0], parts[1]


def photos(file: Path, side: int = 32) -> tuple[Images, Images]:
    """The images of a tar file with a folder for each of the classes, `side` pixels wide and high: 4 of 5 to train."""
    found: list[tuple[str, bytes]] = []
    with tarfile.open(file) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                image = Image.open(content).convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
                found.append((Path(member.name).parent.name, encoded(np.asarray(image))))
    names = sorted({name for name, _ in found})
    labels = np.array([names.index(name) for name, _ in found])
    chosen = np.arange(len(found)) % 5 == 0
    train, test = (([found[i][1] for i in np.flatnonzero(part)], labels[part]) for part in (~chosen, chosen))
    return train, test


def arranged(images: Images, *, sorted_by_class: bool) -> Images:
    files, labels = images
    order = labels.argsort(kind="stable") if sorted_by_class else np.random.default_rng(0).permutation(len(labels))
    return [files[i] for i in order], labels[order]


def net(num_classes: int, in_chans: int) -> nn.Module:
    """Four convolutions with BatchNorm."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((in_chans, 8), (8, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes))


@dataclass(frozen=True)
class Task:
    """What is trained: on shards of `of_shard` images, for `epochs`."""

    name: str
    images: Callable[[], tuple[Images, Images]]
    of_shard: int
    recipe: dict[str, Any]


def accuracy(task: Task, root: Path, order: tuple[int, int] | None, seed: int) -> float:
    """The test accuracy of one run, in percent."""
    data = {"name": "wds", "root": root, "workers": 0, "channels": task.recipe["channels"]}
    if order is not None:
        data |= {"order": "shards", "open_shards": order[0], "canonical_nodes": order[1]}
    recipe = {
        "epochs": task.recipe["epochs"],
        "eval_every_epochs": task.recipe["epochs"],
        "batch_size": 128,
        "virtual_batch_size": 16,
        "optim": {"name": "adamw", "lr": 3e-3},
        "schedule": {"name": "cosine"},
        "augment": {"flip": task.recipe["flip"]},
    }
    model = {"name": f"{Path(__file__).resolve()}:net", "image_size": task.recipe["image_size"]}
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
        run = train(recipe, seed=seed, data=data, model=model, output_dir=Path(place, "run"))
    return 100 * float(run.figures["test_accuracy"])


def accuracies(task: Task, place: Path, seeds: int) -> list[list[str]]:
    """A row for each order."""
    rows = []
    training, test = task.images()
    for sorted_by_class, names in ((True, TRAINED), (False, ("1 x 8",))):
        root = place / task.name / ("sorted" if sorted_by_class else "mixed")
        write_shards(root, "train", arranged(training, sorted_by_class=sorted_by_class), task.of_shard)
        write_shards(root, "test", test, 1000)
        for name in names:
            found = [accuracy(task, root, ORDERS[name], seed) for seed in range(seeds)]
            error = statistics.stdev(found) / math.sqrt(seeds) if seeds > 1 else math.nan
            row = [task.name, name, root.name, " ".join(f"{each:.2f}" for each in found)]
            rows.append([*row, f"{statistics.mean(found):.2f}", f"{error:.2f}"])
            print(*rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="of MNIST; without it no model is trained on that")
    parser.add_argument("--photos", type=Path, help="a tar file of photographs in a folder for each class")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    logging.getLogger("accel_train").addHandler(logging.NullHandler())
    head = ["open x nodes", "shards", "distances", "classes of 32", "shards of an update", "of 1 of 8 processes"]
    rows = [
        [name, "sorted" if sorted_by_class else "mixed", *figures(ORDERS[name], sorted_by_class=sorted_by_class)]
        for sorted_by_class, names in ((True, tuple(ORDERS)), (False, MIXED))
        for name in names
    ]
    print_table(head, rows)
    tasks = []
    if options.data_root is not None:
        recipe = {"channels": 1, "image_size": 28, "epochs": 2, "flip": 0.0}
        tasks.append(Task("MNIST", lambda: mnist(options.data_root), 10, recipe))
    if options.photos is not None:
        recipe = {"channels": 3, "image_size": 32, "epochs": 6, "flip": 0.5}
        tasks.append(Task("photos", lambda: photos(options.photos), 10, recipe))
    with tempfile.TemporaryDirectory() as place:
        rows = [row for task in tasks for row in accuracies(task, Path(place), options.seeds)]
    print_table(["data", "open x nodes", "shards", "accuracies", "mean", "standard error"], rows)


if __name__ == "__main__":
    main()
