"""Work on all images of a dataset in several processes, with a progress bar."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from accel_train.data.sources.splits import Source, unwrap_subset
from accel_train.data.sources.user import UserDataset
from accel_train.data.worker_processes import end_with_trainer, process_pool
from accel_train.errors import is_terminal, print_line

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


@contextmanager
def progress_bar(verb: str, total: int, *, shows_progress: bool) -> Iterator[Callable[[float], None]]:
    """Yield a function that says how many more of `total` images are done: a bar on a terminal, one line at the end
    elsewhere. `verb`: "decoding"."""
    if not shows_progress or not is_terminal(sys.stdout):
        yield lambda count: None
        if shows_progress:
            print_line(f"{verb}: {total:,} images done")
        return
    # A line above the bar is whole, the terminal breaks it; and what goes to a file does not go through the bar.
    console = Console(soft_wrap=True, markup=False, highlight=False)
    columns = TextColumn(verb), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, redirect_stderr=is_terminal(sys.stderr)) as bar:
        task = bar.add_task(verb, total=total)
        yield partial(bar.advance, task)
