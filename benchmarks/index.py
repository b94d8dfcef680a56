"""Measure what the index of a data set saves at each start: image files in folders, tar files, WebDataset shards.

    python benchmarks/index.py                      # 200,000 images
    python benchmarks/index.py --images 1300000     # as many as ImageNet has; needs 10 GB and half an hour

The images are tiny; what is measured is the finding of them, in a new process each time, from the page cache. A network
file system makes the first start slower, not the second.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import tarfile
import tempfile
import time
from pathlib import Path

from PIL import Image

from accel_train.config.schema import Data
from accel_train.data.sources.load import read_splits
from accel_train.records.terminal import print_table

CLASSES = 1000


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    return file.getvalue()


def write_folder(root: Path, images: int) -> None:
    content = picture()
    for number in range(images):
        path = root / f"{number % CLASSES:04}" / f"{number:08}.jpg"
        if number < CLASSES:
            path.parent.mkdir(parents=True)
        path.write_bytes(content)


def write_tars(root: Path, images: int, *, labels: bool) -> None:
    """Ten tar files; with `labels` as WebDataset has them."""
    root.mkdir()
    content = picture()

    def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))

    for part in range(10):
        with tarfile.open(root / f"train-{part}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for number in range(part * images // 10, (part + 1) * images // 10):
                add(archive, f"{number:08}.jpg" if labels else f"{number % CLASSES:04}/{number:08}.jpg", content)
                if labels:
                    add(archive, f"{number:08}.cls", str(number % CLASSES).encode())


def settle(root: Path) -> None:
    """Let everything have been written some time ago: data that may still be changing gets no index."""
    for path in [root, *root.glob("*")]:
        os.utime(path, (time.time() - 60,) * 2)


def _child(kind: str, root: Path, images: int, answer: object) -> None:
    began, worked = time.perf_counter(), time.process_time()
    splits = read_splits(Data(name=kind, root=root))
    assert len(splits.train) == images
    answer.send((time.perf_counter() - began, time.process_time() - worked))  # type: ignore[attr-defined]


def start(kind: str, root: Path, images: int) -> tuple[float, float]:
    """Seconds, and seconds of the processor, until the data set is known."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_child, args=(kind, root, images, there))
    child.start()
    there.close()
    found: tuple[float, float] = here.recv()
    child.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument("--folder", type=Path, help="for the data; default: a temporary one")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        for kind in ("folder", "tar", "wds"):
            root = Path(place) / kind
            if kind == "folder":
                write_folder(root, options.images)
            else:
                write_tars(root, options.images, labels=kind == "wds")
            settle(root)
            first, second = start(kind, root, options.images), start(kind, root, options.images)
            (kept,) = root.glob(".accel-train-index*")
            size = f"{kept.stat().st_size / options.images:.0f}"
            times = [f"{seconds:.2f} s ({work:.2f} s)" for seconds, work in (first, second)]
            rows.append([kind, *times, f"{first[1] / second[1]:.0f}", size])
    print(f"{options.images:,} images: seconds until the data set is known, and of the processor")
    print_table(["--data.name", "first start", "every other", "ratio of the latter", "bytes of index per image"], rows)


if __name__ == "__main__":
    main()
