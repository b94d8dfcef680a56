"""Measure what the index of a data set of files costs and saves: folders, a CSV table, tar files, WebDataset shards.

    python benchmarks/index.py                      # 200,000 images
    python benchmarks/index.py --images 1300000     # as many as ImageNet has; needs 5 GB and ten minutes
    python benchmarks/index.py --images 1000000 --kinds wds

The images are tiny (those of a class in folders are one file of many names); what is measured is the finding of them,
in a new process each time, from the page cache. A network file system makes the first start slower, not the others. How
much a start takes more than with 1,000 images, and the memory of a process, have limits that this program checks. Then
comes the order of an epoch: the numbers of all its samples, which each process computes batch by batch.
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
from pathlib import Path
from typing import Literal, NamedTuple

from PIL import Image

from accel_train.cli.table import print_table
from accel_train.config.schema import Config, Data
from accel_train.data.loading import create_sampler
from accel_train.data.order.plan import create_plan
from accel_train.data.sources.load import Splits, read_splits

CLASSES = 1000
FEW = 1000  # images of the data set to compare with
TARS = ("tar", "wds")
ORDERS = ("full", "shards")
KINDS = ("folder", "csv", *TARS)
SHARD = 10_000  # images of a tar file, of which there are ten or more
BATCH = 256
LONGEST, LARGEST = 2.0, 40.0  # seconds more than with few images, for each 1.3 million; bytes of memory an image


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
    answer.send(Start(seconds, work, held, peak, orders))  # type: ignore[attr-defined]


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--folder", type=Path, help="for the data; default: a temporary one")
    options = parser.parse_args()
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
