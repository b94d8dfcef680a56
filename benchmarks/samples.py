"""Measure what a data set of many samples costs in host memory and time: 10^5 to 10^9 samples.

    python benchmarks/samples.py                    # writes the table in docs/benchmarks.md
    python benchmarks/samples.py --most 1000000 --no-write

Each function is called alone, with as many samples as the table says, in a process of its own, whose largest memory
is read from the system. No images are needed for that, but for the listing of a folder: its files are real, and
empty. What would take more than half of the free memory is left out, and so are more files than --files.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import document
import numpy as np
import psutil
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.cli.table import print_table
from accel_train.data.order.plan import Plan
from accel_train.data.order.samplers import Draws, EvaluationSampler, TrainingSampler
from accel_train.data.sources.divide import stratified_choice
from accel_train.data.sources.files.folder import find_images
from accel_train.data.sources.shared import StringArray
from accel_train.evaluate import evaluate


def host_peak_bytes() -> int:
    """Return the peak of this process's host memory in bytes."""
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    return int(peak[1]) * 1024


SIZES = [10**5, 10**6, 10**7, 10**8, 10**9]
CLASSES, IN_A_FOLDER, BATCH = 1000, 1000, 1 << 16


def name(number: int) -> str:
    """A path as ImageNet has them."""
    return f"n{number % CLASSES:08d}/n{number % CLASSES:08d}_{number}.JPEG"


def seek(samples: int, _: Path) -> None:
    """Go into the middle of an epoch, as a restart does, and take the first batch there."""
    sampler = TrainingSampler(Plan(samples, 1024, 1, 1), seed=0)
    sampler.seek(1, samples // 2)
    next(iter(sampler))


def order(samples: int, _: Path) -> None:
    """The order of a whole epoch; of 10^7 of its samples if it has more."""
    sampler = TrainingSampler(Plan(samples, 1024, 1, 1), seed=0)
    sampler.seek(0, max(0, samples - 10**7) // 1024 * 1024)
    for _block in sampler.blocks():
        pass


def balanced(samples: int, _: Path) -> None:
    """The draws of an epoch with --data.sampler balanced."""
    classes = torch.arange(samples) % CLASSES
    Draws(0, classes, torch.ones(samples, dtype=torch.float64)).of_epoch(0)


def split(samples: int, _: Path) -> None:
    """Choose a tenth for validation, by the names."""
    labels = np.arange(samples) % CLASSES
    stratified_choice(map(name, range(samples)), labels, samples // 10, "0 val")


def paths(samples: int, _: Path) -> None:
    """Keep the paths of all images, as the workers share them."""
    StringArray([name(number) for number in range(samples)])


def listing(samples: int, folder: Path) -> None:
    """List the files of a folder."""
    assert len(find_images(folder / str(samples)).images) == samples


def evaluation(samples: int, _: Path) -> None:
    """Count the results of an evaluation, without a model."""

    def batches() -> Iterator[dict[str, Tensor]]:
        for batch in EvaluationSampler(samples, BATCH).blocks():
            yield {"ids": batch.ids, "weights": batch.weights}

    class Transform:
        num_classes = 10

        def __call__(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            labels = batch["ids"] % 10
            return nn.functional.one_hot(labels, 10).float(), labels

    pipeline = SimpleNamespace(multi_label=False, batches=batches(), transform=Transform(), samples=samples)
    evaluate(Accelerator(cpu=True), nn.Identity(), pipeline)  # type: ignore[arg-type]


PIECES: dict[Callable[[int, Path], None], tuple[str, int]] = {  # what it is called, and bytes a sample at most
    seek: ("a restart's place in the order", 0),
    order: ("the order of an epoch (of 10^7 samples)", 0),
    balanced: ("a balanced epoch's draws", 100),
    split: ("the split by names", 120),
    paths: ("the paths", 250),
    listing: ("listing a folder", 500),
    evaluation: ("an evaluation's results", 150),
}


def _child(piece: Callable[[int, Path], None], samples: int, folder: Path, answer: object) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    piece(samples, folder)
    seconds = time.perf_counter() - began
    answer.send((seconds, max(0, host_peak_bytes() - before)))  # type: ignore[attr-defined]


def measure(piece: Callable[[int, Path], None], samples: int, folder: Path) -> tuple[float, int] | None:
    """(seconds, bytes of memory beyond the start) of a call in a process of its own; None if it does not fit."""
    if PIECES[piece][1] * samples > psutil.virtual_memory().available / 2:
        return None
    here, there = multiprocessing.Pipe()
    # Forked, because importing takes seconds: this process has run no operator of torch, so it has no threads.
    child = multiprocessing.get_context("fork").Process(target=_child, args=(piece, samples, folder, there))
    child.start()
    there.close()
    try:
        found: tuple[float, int] = here.recv()
        return found
    except EOFError:  # killed for its memory
        return None
    finally:
        child.join()


def write_files(folder: Path, count: int) -> None:
    for first in range(0, count, IN_A_FOLDER):
        below = folder / f"n{first // IN_A_FOLDER:08d}"
        below.mkdir(parents=True)
        for number in range(first, min(first + IN_A_FOLDER, count)):
            (below / f"{below.name}_{number}.JPEG").touch()


def shown(found: tuple[float, int] | None) -> str:
    if found is None:
        return "-"
    seconds, extra = found
    memory = f"{extra / 1e9:.1f} GB" if extra >= 1e9 else f"{extra / 1e6:.0f} MB"
    return f"{seconds:.2g} s, {memory}" if seconds < 10 else f"{seconds:.0f} s, {memory}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=SIZES[-1], help="the largest number of samples")
    parser.add_argument("--files", type=int, default=10**6, help="the most files to create")
    parser.add_argument("--folder", type=Path, help="for these files; default: a temporary one")
    parser.add_argument("--no-write", action="store_true", help="only print the table")
    options = parser.parse_args()
    sizes = [size for size in SIZES if size <= options.most]
    known = document.circumstances("python benchmarks/samples.py")
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place)
        for piece, (title, _) in PIECES.items():
            row = [title]
            for size in sizes:
                if piece is listing and size > options.files:
                    row.append("-")
                    continue
                if piece is listing:
                    write_files(folder / str(size), size)
                row.append(shown(measure(piece, size, folder)))
            rows.append(row)
    head = ["", *(f"10^{len(str(size)) - 1} samples" for size in sizes)]
    print_table(head, rows)
    if not options.no_write:
        part = "\n".join([*document.table(head, rows), "", document.caption(known)])
        document.write("samples", part, {"rows": {row[0]: row[1:] for row in rows}})


if __name__ == "__main__":
    main()
