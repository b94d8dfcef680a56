"""Measure the input pipeline alone, and compare it with torchvision's transforms on PIL images.

    python benchmarks/input.py --data-root ~/data      # as `make bench` does
    python benchmarks/input.py --only files            # only a part; writes nothing

All lines of a table take turns in one process, and ratios are computed within a round. A turn lasts at least half a
second, because code that runs after a pause is slower at first. Datasets in memory use the threads that
training has, and are compared with a DataLoader with 0 and with 2 workers, whichever is better. Image files use one
thread and no workers, so the figures are for one core. Without --data-root the small images are synthetic. This
script always writes the files itself: JPEGs of 500x375 pixels. The tables are written to docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from accel_train.launch.environment import prepare_environment

LAUNCH = prepare_environment()  # before torch is imported, which reads some of it

import document  # noqa: E402
import numpy as np  # noqa: E402
import tasks  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402
from torchvision import transforms  # noqa: E402

from accel_train.cli.common import print_table  # noqa: E402
from accel_train.config.schema import Augment, Config, Data  # noqa: E402
from accel_train.data.batch_transform import BatchTransform  # noqa: E402
from accel_train.data.loading import create_input_pipeline, create_loader  # noqa: E402
from accel_train.data.order import Plan, TrainingSampler  # noqa: E402
from accel_train.data.sources.images import IMAGENET_MEAN, IMAGENET_STD  # noqa: E402
from accel_train.data.sources.load import load_splits  # noqa: E402
from accel_train.launch.accelerator import create_accelerator  # noqa: E402
from accel_train.optim.performance import set_defaults  # noqa: E402
from accel_train.tools.bench import Clock, ratio, spread  # noqa: E402
from accel_train.tools.shards import write_shards  # noqa: E402

CROP_AND_FLIP = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
MEMORY = {  # task of tasks.py, augmentation with torchvision, augmentation with accel_train
    "mnist": ("mnist_cnn", [], Augment()),
    "cifar10": ("cifar10_resnet18", CROP_AND_FLIP, Augment(crop="random", pad=4, flip=0.5)),
}
FILES, FILE_BATCH, SIZE = 128, 64, 224
ENCODINGS: tuple[Literal["jpeg", "raw"], ...] = ("jpeg", "raw")
AHEAD = 4  # batches: two for each worker of a DataLoader
IDLE_SECONDS = 0.5  # after it workers have filled their queues and no longer disturb the next measurement
TURN_SECONDS = 0.5
Inputs = Iterator[int]
"""Makes input for ever; yields the number of images of each batch."""


def in_memory(name: str, root: Path | None) -> dict[str, Inputs]:
    """Return the input of torchvision's dataset with PIL and a DataLoader, and accel_train's as in train.py."""
    task_name, augmentation, augment = MEMORY[name]
    task = tasks.TASKS[task_name]
    root = task.root(root)
    transform = transforms.Compose([*augmentation, *task.transform().transforms])
    dataset = task.dataset(root, transform)
    ways: dict[str, Inputs] = {}
    for workers in (0, 2):
        loader = DataLoader(
            dataset, task.batch_size, shuffle=True, num_workers=workers, persistent_workers=workers > 0, drop_last=True
        )
        ways[f"torchvision + PIL, {workers} workers"] = by_torchvision(loader)

    data = Data(name="synthetic", channels=task.channels, train_limit=task.images)
    if root is not None:
        data = Data(name=name, root=root)
    config = Config(batch_size=task.batch_size, augment=augment, data=data)
    splits = load_splits(data, 0, size=task.size)
    order = TrainingSampler(Plan(len(splits.train), task.batch_size, 1, 1, drop_last=True), 0)
    accelerator = create_accelerator(LAUNCH)
    layout = torch.channels_last if task.channels > 1 else torch.contiguous_format
    options: dict[str, Any] = {"training": True, "size": task.size, "memory_format": layout}
    feed = create_input_pipeline(config, splits, splits.train, order, accelerator, **options)
    print(f"accel_train: {feed.placement}")
    return {**ways, "accel_train": by_accel_train(order, lambda: feed.batches, feed.transform)}


def by_torchvision(loader: DataLoader[Any]) -> Inputs:
    while True:
        for images, _ in loader:
            yield len(images)


def by_accel_train(order: TrainingSampler, batches: Callable[[], Iterable[Any]], transform: BatchTransform) -> Inputs:
    for epoch in itertools.count():
        order.seek(epoch)
        for batch in batches():
            images, _ = transform(batch)
            yield len(images)


class ImageFolder(Dataset[Any]):
    """Reads a folder as tutorials do: opens a PIL image for each access."""

    def __init__(self, root: Path) -> None:
        self.files = sorted((root / "train").rglob("*.jpg"))
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(SIZE),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with Image.open(self.files[index]) as image:
            return self.transform(image.convert("RGB")), 0


def from_files(folder: Path) -> dict[str, Inputs]:
    """Return the input from a folder with PIL and with accel_train, and from accel_train's shards of it."""
    root = folder / "photographs"
    write_files(root)
    data = {"accel_train, folder": Data(name="folder", root=root)}
    for encoding in ENCODINGS:
        write_shards(Data(name="folder", root=root), folder / encoding, encoding=encoding, processes=1)
        data[f"accel_train, {encoding} shards"] = Data(name="wds", root=folder / encoding)
    loader = DataLoader(ImageFolder(root), FILE_BATCH, shuffle=True)
    ways = {"torchvision + PIL, folder": by_torchvision(loader)}
    return ways | {name: on_this_core(each) for name, each in data.items()}


def on_this_core(data: Data) -> Inputs:
    """Do the work of a worker and then that of the device, on one core."""
    augment, cpu = Augment(crop="resized", flip=0.5), torch.device("cpu")
    source = load_splits(data, 0).train
    order = TrainingSampler(Plan(len(source), FILE_BATCH, 1, 1), 0)
    transform = BatchTransform(
        augment,
        size=SIZE,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        num_classes=2,
        training=True,
        per_image=True,
        device=cpu,
        memory_format=torch.channels_last,
    )
    loader = create_loader(source, order, transform, seed=0, workers=0, device=cpu)
    return by_accel_train(order, lambda: loader, transform)


def write_files(root: Path) -> None:
    """Write artificial photographs: smooth colours with some noise, about 60 kB each."""
    numbers = np.random.default_rng(0)
    for number in range(FILES):
        coarse = Image.fromarray(numbers.integers(0, 256, (31, 42, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC)).astype(np.int16)
        grain = numbers.normal(0, 6, smooth.shape).astype(np.int16)
        path = root / "train" / str(number % 2) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(path, quality=90)


def measure(ways: dict[str, Inputs], rounds: int) -> dict[str, list[float]]:
    """Return the images per second of each way. The ways take turns; the first round is a warm-up."""
    rates_of: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, inputs in ways.items():
            time.sleep(IDLE_SECONDS)
            rate = turn(inputs)
            if number:
                rates_of[name].append(rate)
    return rates_of


def turn(inputs: Inputs) -> float:
    """Return the images per second of the next half second, after the batches that workers loaded in the pause."""
    for _ in itertools.islice(inputs, AHEAD):
        pass
    clock, count = Clock(tasks.best_device()), 0
    clock.start()
    end = time.perf_counter() + TURN_SECONDS
    while time.perf_counter() < end:
        count += next(inputs)
    return count / clock.stop()


def rows(rates_of: dict[str, list[float]], base: str) -> list[list[str]]:
    table = []
    for name, rates in rates_of.items():
        rate, times = spread(rates), ratio(rates, rates_of[base])
        table.append([name, f"{rate.median:,.0f}", f"{times.median:.2f}", f"{times.low:.2f} to {times.high:.2f}"])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="folder of torchvision's datasets; default: synthetic images")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=[*MEMORY, "files"])
    options = parser.parse_args()
    command = f"python benchmarks/input.py --rounds {options.rounds}" + " --data-root DIR" * bool(options.data_root)
    figures: dict[str, Any] = {"circumstances": document.circumstances(command), "rounds": options.rounds}
    set_defaults(tasks.best_device())  # the same for all ways
    threads = torch.get_num_threads()
    parts = []
    for name in options.only or [*MEMORY, "files"]:
        if name == "files":
            torch.set_num_threads(1)
            with tempfile.TemporaryDirectory() as folder:
                rates_of = measure(from_files(Path(folder)), options.rounds)
            title, base = f"JPEG of 500x375, RandomResizedCrop {SIZE} and flip, one core", "torchvision + PIL, folder"
        else:
            torch.set_num_threads(threads)
            rates_of = measure(in_memory(name, options.data_root), options.rounds)
            task = tasks.TASKS[MEMORY[name][0]]
            kind = "real" if task.root(options.data_root) else "synthetic"
            title = f"{name} ({kind} images), batches of {task.batch_size}, {threads} threads"
            base = max((way for way in rates_of if way != "accel_train"), key=lambda way: spread(rates_of[way]).median)
        head, table = [title, "images/s", "ratio", "quartiles"], rows(rates_of, base)
        print()
        print_table(head, table, numbers=head[1:])
        figures[name] = {way: dataclasses.asdict(ratio(rates, rates_of[base])) for way, rates in rates_of.items()}
        parts += ["", *document.table(head, table)]
    if not options.only:
        note = f"Medians of {options.rounds} rounds; ratios to the better line of torchvision and PIL."
        page = "\n".join([*parts, "", note, document.caption(figures["circumstances"])])
        document.tell("input", document.write("input", page, figures))


if __name__ == "__main__":
    main()
