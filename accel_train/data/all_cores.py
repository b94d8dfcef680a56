"""Work on many things that begins in this process, and goes on with all cores if it takes long."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from accel_train.data.worker_processes import WORKERS, WorkerContext, end_with_trainer
from accel_train.launch.process import available_cores

PATIENCE_SECONDS = 3.0
"""To start processes, which import torch, takes about as long."""

Thing = TypeVar("Thing")
Result = TypeVar("Result")


def on_all_cores(work: Callable[[Thing], Result], things: Sequence[Thing]) -> Iterator[Result]:
    """Yield the result of `work` of each of the `things`, in their order. Raises what `work` raises.

    `work`, `things` and results are pickled. Processes are started only if there is enough to do.
    """
    began = time.monotonic()
    for done, thing in enumerate(things):
        processes = min(available_cores(), len(things) - done)
        if processes > 1 and time.monotonic() - began > PATIENCE_SECONDS:
            # They import the same as the processes that load images, for whom the server stays.
            with process_pool(processes, WORKERS, end_with_trainer) as pool:
                left = len(things) - done
                yield from pool.map(work, things[done:], chunksize=1 + left // (64 * processes))
            return
        yield work(thing)


@contextmanager
def process_pool(
    processes: int, module: str, initializer: Callable[..., object], *arguments: Any
) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes are killed if the block is left by an error: else Ctrl-C would wait until they have done
    their jobs. `module`: see `WorkerContext`; `initializer(*arguments)` is called in each process."""
    before = set(multiprocessing.active_children())
    with ProcessPoolExecutor(processes, WorkerContext(module), initializer=initializer, initargs=arguments) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - before:
                worker.kill()
            raise
