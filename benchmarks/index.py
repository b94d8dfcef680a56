"""Measure what the index of a data set of files costs and saves: folders, a CSV table, tar files, WebDataset shards.

    python benchmarks/index.py                      # 200,000 images
    python benchmarks/index.py --images 1300000     # as many as ImageNet has; needs 5 GB and ten minutes
    python benchmarks/index.py --images 1000000 --kinds wds
    python benchmarks/index.py --images 14000000 --without-images    # an index alone, as that of ImageNet-21k: 1 GB

The images are tiny (those of a class in folders are one file of many names); what is measured is the finding of them,
in a new process each time, from the page cache. A network file system makes the first start slower, not the others. How
much a start takes more than with 1,000 images, and the memory of a process, have limits that this program checks. Then
comes the order of an epoch: the numbers of all its samples, which each process computes batch by batch.

With --without-images there are empty folders, or empty tar files, and an index of images that are not in them, so that
a start can be measured with more images than a disk is filled with in an hour. What is then measured, too: the start of
a run in the middle of an epoch (until its first batch's numbers), the first lines of a run that count the classes, the
samples of an evaluation, and a division (--data.val-fraction), which hashes each name.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import re
import resource
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image

from accel_train.cli.table import print_table
from accel_train.config.schema import Config, Data
from accel_train.data.loading import create_sampler
from accel_train.data.order.plan import create_plan
from accel_train.data.order.samplers import EvaluationSampler
from accel_train.data.sources.divide import divide
from accel_train.data.sources.files.index import Index, SplitFiles, _state, index_places, write_index
from accel_train.data.sources.load import Splits, read_splits
from accel_train.data.sources.shared import SharedArray, StringArray
from accel_train.records.summary import class_counts

CLASSES = 1000
FEW = 1000  # images of the data set to compare with
TARS = ("tar", "wds")
ORDERS: tuple[Literal["full", "shards"], ...] = ("full", "shards")
KINDS = ("folder", "csv", *TARS)
SHARD = 10_000  # images of a tar file, of which there are ten or more
BATCH = 256
STEPS = ("classes counted", "resumed, full", "resumed, shards", "evaluation", "divided")
LONGEST, LARGEST = 2.0, 40.0  # seconds more than with few images, for each 1.3 million; bytes of memory an image
MOST = 10.0  # seconds more with an index of 14 million


class Start(NamedTuple):
    seconds: float
    """Until the data set is known."""
    work: float
    """Seconds of the processor, in this process and those that it started."""
    memory: int
    """Bytes that the process has more, beside what is mapped from a file."""
    peak: int
    """The most that it had until then, of all kinds."""
    order: dict[str, float]
    """--data.order -> seconds of the processor for the order of an epoch."""
    steps: dict[str, float]
    """Seconds of the processor for other things that a run does with all samples."""


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    return file.getvalue()


def write_folder(root: Path, images: int) -> None:
    """Each class has one file with a name for each image: no file system would write a million files as fast."""
    content = picture()
    for number in range(images):
        path = root / f"{number % CLASSES:04}" / f"{number:08}.jpg"
        if number < CLASSES:
            path.parent.mkdir(parents=True)
            path.write_bytes(content)
        else:
            os.link(path.with_name(f"{number % CLASSES:08}.jpg"), path)


def write_table(root: Path, images: int) -> None:
    rows = (f"{number % CLASSES:04}/{number:08}.jpg,{number % CLASSES}\n" for number in range(images))
    (root / "labels.csv").write_text("path,label\n" + "".join(rows))


def write_tars(root: Path, images: int, *, labels: bool) -> None:
    """Ten tar files, or more; with `labels` as WebDataset has them."""
    root.mkdir()
    parts = max(10, images // SHARD)
    content = picture()

    def blocks(content: bytes) -> tuple[bytes, int, bytes]:
        """What comes after the name, the checksum without the name, and the padded content."""
        info = tarfile.TarInfo("")
        info.size = len(content)
        header = info.tobuf(tarfile.USTAR_FORMAT)
        total = sum(header[:148]) + 8 * ord(" ") + sum(header[156:])
        return header, total, content + bytes(-len(content) % tarfile.BLOCKSIZE)

    def add(file: io.BufferedWriter, name: str, made: tuple[bytes, int, bytes]) -> None:
        header, total, padded = made
        encoded = name.encode()
        checksum = f"{total + sum(encoded):06o}\0 ".encode()
        file.write(encoded.ljust(100, b"\0") + header[100:148] + checksum + header[156:] + padded)

    image, numbers = blocks(content), [blocks(str(label).encode()) for label in range(CLASSES)]
    for part in range(parts):
        with (root / f"train-{part:04}.tar").open("wb") as file:
            for number in range(part * images // parts, (part + 1) * images // parts):
                add(file, f"{number:08}.jpg" if labels else f"{number % CLASSES:04}/{number:08}.jpg", image)
                if labels:
                    add(file, f"{number:08}.cls", numbers[number % CLASSES])
            file.write(bytes(20 * tarfile.BLOCKSIZE))


def write(kind: str, root: Path, images: int) -> Path:
    """Write a data set; return its --data.root."""
    if kind in ("folder", "csv"):
        write_folder(root, images)
        if kind == "csv":
            write_table(root, images)
    else:
        write_tars(root, images, labels=kind == "wds")
    # Let everything have been written some time ago: data that may still be changing gets no index.
    for path in [root, *root.glob("*")]:
        os.utime(path, (time.time() - 60,) * 2)
    return root / "labels.csv" if kind == "csv" else root


def write_index_alone(kind: str, root: Path, images: int) -> Path:
    """Write an index of images that are not there; return the --data.root."""
    root.mkdir()
    classes = tuple(f"{number:04}" for number in range(CLASSES))
    numbers = np.arange(images)
    labels = np.sort(numbers % CLASSES) if kind not in TARS else numbers % CLASSES
    names = [
        b"%04d/%08d.jpg" % pair if kind != "wds" else b"%08d.jpg" % pair[1]
        for pair in zip(labels, numbers, strict=True)
    ]
    lengths = np.full(images, len(names[0]), dtype=np.int64)
    text = StringArray.of(
        SharedArray(np.frombuffer(bytearray(b"".join(names)), np.uint8)), SharedArray(lengths.cumsum())
    )
    tars, places, positions, stats, table = [], [], None, None, ""
    if kind in TARS:
        tars = [f"train-{part:05}.tar" for part in range(max(10, images // SHARD))]
        for name in tars:
            (root / name).touch()
        places = tars
        parts = np.sort(numbers % len(tars))
        positions = SharedArray(np.stack([parts, 512 + 1024 * numbers, np.full(images, 600)], axis=1))
    else:
        for name in classes:
            (root / name).mkdir()
        places = ["", *classes]
        if kind == "csv":
            (root / "labels.csv").write_text("path,label\n")
            places, table = ["labels.csv", *classes], "0" * 64
        stats = SharedArray(np.stack([np.full(images, 600), np.full(images, 10**18)], axis=1))
    for path in [root, *root.glob("*")]:
        os.utime(path, (time.time() - 60,) * 2)
    found = SplitFiles(text, torch.from_numpy(labels.astype(np.int64)), positions, stats)
    index = Index(tuple(places), classes, {"train": found}, tuple(tars), table=table)
    name = "csv-labels.csv" if kind == "csv" else kind
    written = write_index(index_places(root, name), root, index, {place: _state(root, place) for place in places})
    assert written.file is not None
    return root / "labels.csv" if kind == "csv" else root


def memory() -> int:
    """Bytes of this process that are not those of a file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


def _child(kind: str, root: Path, images: int, cores: int, answer: object) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    began, before = time.perf_counter(), memory()
    splits = read_splits(Data(name=kind, root=root))
    assert len(splits.train) == images
    seconds, held, work = time.perf_counter() - began, memory() - before, sum(os.times()[:4])
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    orders = {"full": epoch(kind, splits, "full")}
    if kind in TARS:
        orders["shards"] = epoch(kind, splits, "shards")
    answer.send(Start(seconds, work, held, peak, orders, other_steps(kind, root, splits)))  # type: ignore[attr-defined]


def other_steps(kind: str, root: Path, splits: Splits) -> dict[str, float]:
    """What a run does besides with all samples -> seconds of the processor."""

    def evaluation() -> None:
        assert sum(len(batch) for batch in EvaluationSampler(len(splits.train), BATCH)) >= len(splits.train)

    steps: dict[str, Callable[[], object]] = {
        "classes counted": lambda: class_counts(splits),
        **{
            f"resumed, {order}": partial(resumed, kind, splits, order)
            for order in (ORDERS if kind in TARS else ORDERS[:1])
        },
        "evaluation": evaluation,
        "divided": lambda: divide(splits, Data(name=kind, root=root, val_fraction=0.1), 0),
    }
    seconds = {}
    for name, step in steps.items():
        began = time.process_time()
        step()
        seconds[name] = time.process_time() - began
    return seconds


def resumed(kind: str, splits: Splits, order: Literal["full", "shards"]) -> None:
    """Find the samples of the first batch of a run that goes on in the middle of its second epoch."""
    config = Config(batch_size=BATCH, epochs=2, data=Data(name=kind, order=order))
    sampler = create_sampler(config, splits, create_plan(config, len(splits.train), 1, 1, 1))
    sampler.seek(1, len(splits.train) // 2 // BATCH * BATCH)
    assert len(next(iter(sampler))) == BATCH


def epoch(kind: str, splits: Splits, order: Literal["full", "shards"]) -> float:
    """Seconds of the processor for the numbers of all samples of an epoch."""
    began = time.process_time()
    config = Config(batch_size=BATCH, data=Data(name=kind, order=order))
    sampler = create_sampler(config, splits, create_plan(config, len(splits.train), 1, 1, 1))
    assert sum(len(batch) for batch in sampler) >= len(splits.train)
    return time.process_time() - began


def start(kind: str, root: Path, images: int, cores: int) -> Start:
    """A new process that finds the data set."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_child, args=(kind, root, images, cores, there))
    child.start()
    there.close()
    found: Start = here.recv()
    child.join()
    return found


def index_file(root: Path) -> Path:
    (kept,) = (root if root.is_dir() else root.parent).glob(".accel-train-index*")
    return kept


def without_images(images: int, kinds: list[str], folder: Path | None) -> int:
    """Measure starts with an index of images that are not there."""
    rows, within, cores = [], True, len(os.sched_getaffinity(0))
    for kind in kinds:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            few, many = (write_index_alone(kind, Path(place) / str(count), count) for count in (FEW, images))
            small, large = start(kind, few, FEW, cores), start(kind, many, images, cores)
            size = index_file(many).stat().st_size / images
            more, held = large.seconds - small.seconds, (large.memory - small.memory) / (images - FEW)
            within &= more <= MOST and held <= LARGEST
            rows.append([
                kind, f"{small.seconds:.2f} s", f"{large.seconds:.2f} s ({large.work - small.work:.2f} s more)",
                f"{held:.1f}", f"{size:.0f}",
                *(f"{large.order[order]:.1f} s" if order in large.order else "" for order in ORDERS),
                *(f"{large.steps[name]:.2f} s" if name in large.steps else "" for name in STEPS),
            ])  # fmt: skip
            print(*rows[-1], sep="; ", file=sys.stderr, flush=True)
    print(f"An index of {images:,} images that are not there: seconds of the wall, else of the processor")
    print_table([
        "--data.name", f"start with {FEW:,} images", f"with {images:,} (processor)", "bytes an image: memory", "index",
        *(f"an epoch's order, {order}" for order in ORDERS), *STEPS,
    ], rows)  # fmt: skip
    print(f"at most {MOST:g} s more, and {LARGEST:g} bytes an image: {'yes' if within else 'NO'}")
    return 0 if within else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--folder", type=Path, help="for the data; default: a temporary one")
    parser.add_argument("--without-images", action="store_true", help="write an index, and not what it is of")
    options = parser.parse_args()
    if options.without_images:
        return without_images(options.images, options.kinds, options.folder)
    all_cores = len(os.sched_getaffinity(0))
    rows, within = [], True
    for kind in options.kinds:
        with tempfile.TemporaryDirectory(dir=options.folder) as place:
            few, many = (write(kind, Path(place) / str(count), count) for count in (FEW, options.images))
            one = start(kind, many, options.images, 1)
            index_file(many).unlink()
            all_of_them = start(kind, many, options.images, all_cores)
            start(kind, few, FEW, 1)
            small = min((start(kind, few, FEW, all_cores) for _ in range(3)), key=lambda each: each.seconds)
            large = min((start(kind, many, options.images, all_cores) for _ in range(3)), key=lambda each: each.seconds)
            size = index_file(many).stat().st_size / options.images
            more, held = large.seconds - small.seconds, (large.memory - small.memory) / (options.images - FEW)
            within &= more <= LONGEST * max(1, options.images / 1.3e6) and held <= LARGEST
            rows.append([
                kind, f"{one.seconds:.1f} s ({one.work:.1f} s)", f"{all_of_them.seconds:.1f} s",
                f"{one.seconds / all_of_them.seconds:.1f}", f"{small.seconds:.3f} s",
                f"{large.seconds:.3f} s ({large.work:.2f} s)",
                f"{more:.2f} s", f"{one.work / large.work:.0f}", f"{held:.1f}", f"{size:.0f}",
                f"{(one.peak - small.peak) / 1e6:.0f} MB",
                *(f"{large.order[order]:.2f} s" if order in large.order else "" for order in ORDERS),
            ])  # fmt: skip
    print(f"{options.images:,} images: seconds until the data set is known, and of the processor")
    print_table([
        "--data.name", "index made, 1 core", f"{all_cores} cores", "times as fast", f"start with {FEW:,} images",
        f"with {options.images:,}", "more", "the index saves (times)", "bytes an image: memory", "index",
        "memory to make it", *(f"an epoch's order, {order}" for order in ORDERS),
    ], rows)  # fmt: skip
    answer = "yes" if within else "NO"
    print(f"at most {LONGEST:g} s more for 1.3 million images, and {LARGEST:g} bytes an image: {answer}")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
