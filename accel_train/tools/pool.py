"""Work on all images of a dataset in several processes, with a progress display."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from accel_train.data.sources.splits import Source, unwrap_subset
from accel_train.data.sources.user import UserDataset
from accel_train.data.worker_processes import end_with_trainer, process_pool
from accel_train.errors import print_line

T = TypeVar("T")


def jobs_of(sources: list[Source], chunk: int) -> list[tuple[int, int, int]]:
    """Divide all images of the sources into jobs of `chunk` images: the source's number, first and last image + 1."""
    return [
        (number, first, min(first + chunk, len(source)))
        for number, source in enumerate(sources)
        for first in range(0, len(source), chunk)
    ]


def in_processes(
    work: Callable[..., T], sources: list[Source], jobs: Sequence[tuple[Any, ...]], processes: int, *arguments: Any
) -> Iterator[T]:
    """Yield the result of `work(sources[number], …, *arguments)` of each job (number, …), in the order of the jobs.

    If a source is an object of this program that no other process can make, this process does all.
    """
    held = [unwrap_subset(source)[0] for source in sources]
    if any(isinstance(each, UserDataset) and each.stays_here() for each in held):
        processes = 1
    processes = min(processes, len(jobs))
    if processes <= 1:
        for number, *job in jobs:
            yield work(sources[number], *job, *arguments)
        return
    with process_pool(processes, work.__module__, _start, sources) as pool:
        pending: deque[Future[T]] = deque()
        for number, *job in jobs:
            pending.append(pool.submit(_run, work, number, *job, *arguments))
            if len(pending) >= 4 * processes:  # so that the queue does not hold a million images
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


_sources: list[Source] = []  # of a worker process


def _start(sources: list[Source]) -> None:
    end_with_trainer()
    torch.set_num_threads(1)
    _sources[:] = sources


def _run(work: Callable[..., T], number: int, *arguments: Any) -> T:
    return work(_sources[number], *arguments)


class ProgressDisplay:
    """The progress: a bar on a terminal, otherwise a line after every tenth of the images."""

    def __init__(self, verb: str, total: int, *, quiet: bool = False) -> None:
        """`verb`: "decod", which becomes "decoding" and "decoded". `quiet`: nothing is shown."""
        self.console = console = Console(soft_wrap=True, highlight=False, markup=False)
        self.verb, self.total, self.done, self.quiet, self.printed = verb, total, 0, quiet, 0
        self.bar = Progress(
            TextColumn(f"{verb}ing"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal or not total,
        )
        self.task = self.bar.add_task("", total=total, note="")

    def __enter__(self) -> ProgressDisplay:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self.bar.disable:  # older versions of rich (13) end a disabled bar, too, with an empty line
            self.bar.stop()

    def advance(self, count: int, unreadable: int | None = None) -> None:
        """Say that `count` more images are done, and how many were `unreadable` in all (None: none was decoded)."""
        self.done += count
        note = "" if unreadable is None else f"{unreadable} unreadable"
        self.bar.update(self.task, completed=self.done, note=note)
        tenth = 10 * self.done // self.total
        if not self.quiet and not self.console.is_terminal and tenth > self.printed:
            self.printed = tenth
            print_line(f"{self.verb}ed {self.done} of {self.total} images{', ' * bool(note)}{note}")
