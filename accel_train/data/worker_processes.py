"""How worker processes are started, and how they end: those that load images, and those of the tools.

Workers are never forked from the trainer, but from a server: a separate process that has only imported what they need
(multiprocessing's "forkserver"; on a CPU too, so that tests there cover what runs on a GPU). A fork copies one thread
and all memory. CUDA and other device drivers do not work in the copy of a process that uses them, and a lock that
another thread holds at that moment (NCCL, gloo, OpenMP, the display) stays locked in the copy for ever. "spawn" is as
safe, but each worker would import torch separately.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from accel_train.compat import (
    ForkServerContext,
    ForkServerWorker,
    shorten_socket_paths,
    start_fork_server,
    start_resource_tracker,
)
from accel_train.launch.process import available_cores
from accel_train.launch.stopping import ENDINGS, WARNINGS

WORKERS = "accel_train.data.workers"
"""The module of the data workers."""
STOP_SIGNALS = (signal.SIGINT, *WARNINGS, *ENDINGS)
"""Sent to every process of a job. The trainer then saves a checkpoint, for which it still needs its workers."""


def start_server(module: str) -> None:
    """Start this process's server, unless it runs already. Returns at once, while the server imports `module`.

    `module`: what the workers need. Call this as soon as it is clear that there will be workers: the first one waits
    for the imports.
    """
    multiprocessing.set_forkserver_preload([module])
    _ensure_server()


def _ensure_server() -> None:
    """Start the server if it does not run, or not any more."""
    # The server must find modules where this process does. By default it would search the working directory first,
    # where one of the user's files may have the name of a module.
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    shorten_socket_paths()
    variables = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in variables}
    # Processes started here inherit the blocked signals, and so do the workers: SIGTERM would end the server. This
    # process receives such a signal a moment later.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        start_resource_tracker()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # again, because that has unblocked some
        os.environ.update(variables)
        start_fork_server()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Worker(ForkServerWorker):
    ensure_server = staticmethod(_ensure_server)


class WorkerContext(ForkServerContext):
    """A DataLoader's `multiprocessing_context`, or a ProcessPoolExecutor's `mp_context`."""

    Process = _Worker

    def __init__(self, module: str) -> None:
        """`module`: as `start_server` has it."""
        super().__init__()
        start_server(module)  # before a queue starts the resource tracker with no signal blocked


def _end_workers() -> None:
    """Kill remaining workers at exit: multiprocessing would send SIGTERM, which they ignore, and wait for ever."""
    workers = [child for child in multiprocessing.active_children() if child.daemon]
    for worker in workers:
        worker.kill()


atexit.register(_end_workers)  # handlers run in reverse order: this one before multiprocessing.util's, imported above


def end_with_trainer(_worker: int = 0) -> None:
    """In a worker: ignore the signals that stop a run, and end when the trainer ends, however it ends.

    A pool's initializer, or a loader's worker_init_fn, which is given the worker's number.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_wait_for_trainer, daemon=True).start()


def _wait_for_trainer() -> None:
    """Kill this worker when the trainer has ended. torch's own check watches the parent, which is the server here."""
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    multiprocessing.connection.wait([trainer.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


# Work on many things that begins in this process, and goes on with all cores if it takes long.


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
