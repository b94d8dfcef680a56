"""What `accel-train check-data` does: decode every image of a data set and list the unreadable ones."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import tempfile
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from accel_train.config import Data
from accel_train.data.images import EncodedImages
from accel_train.data.sources import Source, load_splits
from accel_train.errors import UserError

CHUNK = 64  # images of one job
SHOWN = 10  # unreadable images that are printed with their reason

Unreadable = tuple[str, str]
"""Name of the image, and why it cannot be read."""


def check_data(data: Data, output: Path, processes: int) -> int:
    """Decode all images of `data` in `processes` processes; list the unreadable ones in the file `output`.

    The list has one path a line, relative to data.root, sorted; it is empty if all can be read, and it is
    written whole or not at all. Returns the number of unreadable images. Raises UserError.
    """
    _prepare(output)
    whole = replace(data, skip_unreadable=None, val_fraction=0.0, test_fraction=0.0, train_limit=None, test_limit=None)
    splits = load_splits(whole, seed=0)
    sources = [source for source in (splits.train, splits.validation, splits.test) if source is not None]
    total = sum(map(len, sources))
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if not isinstance(sources[0], EncodedImages):
        console.print(f"The {total} images of '{data.name}' lie in memory: there is nothing to decode.")
        sources = []
    found: list[Unreadable] = []
    with _Shown(console, total if sources else 0) as shown:
        for count, unreadable in _decode_all(sources, processes):
            found += unreadable
            shown.advance(count, len(found))
    found.sort()
    _write(output, [name.removeprefix(f"{data.root}/") for name, _ in found])
    for name, why in found[:SHOWN]:
        console.print(f"  {name}: {why}")
    if len(found) > SHOWN:
        console.print(f"  … and {len(found) - SHOWN} more.")
    if found:
        console.print(
            f"{len(found)} of {total} images cannot be read. They are listed in {output}; leave them out with"
        )
        options = f"--data.name {data.name} --data.root {shlex.quote(str(data.root))}"
        console.print(f"  accel-train train RECIPE {options} --data.skip-unreadable {shlex.quote(str(output))}")
    elif sources:
        console.print(f"All {total} images can be read.")
    return len(found)


class _Shown:
    """The progress: a bar on a terminal, else a line for every tenth."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.done, self.printed = console, total, 0, 0
        self.bar = Progress(
            TextColumn("decoding"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unreadable]} unreadable"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal or not total,
        )
        self.task = self.bar.add_task("", total=total, unreadable=0)

    def __enter__(self) -> _Shown:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def advance(self, count: int, unreadable: int) -> None:
        self.done += count
        self.bar.update(self.task, completed=self.done, unreadable=unreadable)
        tenth = 10 * self.done // self.total
        if not self.console.is_terminal and tenth > self.printed:
            self.printed = tenth
            self.console.print(f"decoded {self.done} of {self.total} images, {unreadable} unreadable")


_sources: list[Source] = []  # of a worker process


def _start(sources: list[Source]) -> None:
    torch.set_num_threads(1)
    _sources[:] = sources


def _check(number: int, first: int, last: int) -> tuple[int, list[Unreadable]]:
    return _unreadable(_sources[number], first, last)


def _unreadable(source: Source, first: int, last: int) -> tuple[int, list[Unreadable]]:
    """(images tried, those of them that cannot be read) among images first..last-1."""
    found = []
    for id in range(first, last):
        try:
            source.fetch([id])
        except UserError as error:
            found.append((source.name(id), str(error.__cause__ or error)))
    return last - first, found


def _decode_all(sources: list[Source], processes: int) -> Iterator[tuple[int, list[Unreadable]]]:
    jobs = [
        (number, first, min(first + CHUNK, len(source)))
        for number, source in enumerate(sources)
        for first in range(0, len(source), CHUNK)
    ]
    processes = min(processes, len(jobs))
    if processes <= 1:
        for number, first, last in jobs:
            yield _unreadable(sources[number], first, last)
        return
    spawn = multiprocessing.get_context("spawn")  # forking a process that runs torch's threads is not safe
    with ProcessPoolExecutor(processes, spawn, initializer=_start, initargs=(sources,)) as pool:
        try:
            pending = set()
            for job in jobs:
                pending.add(pool.submit(_check, *job))
                if len(pending) >= 4 * processes:  # so that a million images do not lie in the queue
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            yield from (future.result() for future in pending)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _prepare(output: Path) -> None:
    """Find out now, not after an hour, that the list cannot be written."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
        if output.is_dir():
            raise IsADirectoryError("it is a folder")
    except OSError as error:
        raise UserError(
            f"the list {output} cannot be written ({error.strerror or error}): choose another place."
        ) from error


def _write(output: Path, paths: list[str]) -> None:
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", errors="surrogateescape") as file:
            file.writelines(f"{path}\n" for path in paths)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)
