"""The worker processes that load images: what they do, and how they are started.

They are forked from a server, a process of its own that has only imported what they need, and never from the trainer
(multiprocessing's "forkserver", on a CPU, too, so that what is tested there is what runs on a GPU). A fork copies one
thread and all memory: CUDA, and every other driver of a device, does not work in a copy of a process that uses it, and
a lock that another thread holds at that moment (of NCCL's or gloo's threads, OpenMP, the display) stays locked in the
copy for ever. "spawn" is as safe, but each worker would import torch by itself.

What a worker is given is pickled. Tensors travel as shared memory, one copy for all; `Shared` does so with arrays.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from torch import Tensor
from torch.utils.data import Dataset

from accel_train.data.order.keyed import hashed, key
from accel_train.data.order.samplers import Draw
from accel_train.data.sources.encoded import EncodedImages
from accel_train.data.sources.splits import Source, owner
from accel_train.data.transforms.device_decoding import Reading, Undecoded
from accel_train.data.transforms.image import ImageTransform
from accel_train.data.transforms.parameters import AugmentParameters
from accel_train.errors import UserError

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""They go to every process of a job. The trainer answers them with a checkpoint, for which it needs its workers."""


class BatchedSet(Dataset[dict[str, Any]]):
    """Fetches a whole draw at once. Holds no state: epoch and keys come with each draw, so that a worker process
    that outlives an epoch never works with the last one's."""

    def __init__(
        self,
        source: Source,
        transform: ImageTransform | Reading | None,
        seed: int,
        draws: AugmentParameters | None = None,
    ) -> None:
        self.source = source
        self.held, self.held_ids = owner(source)
        self.transform = transform
        self.seed = seed
        self.draws = draws

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, draw: Draw) -> dict[str, Any] | UserError:
        """images uint8 [b, C, H, W], or yet Undecoded; labels, ids and keys int64 [b]; weights float32 [b]; and as
        "parameters" what `draws` draws.

        An unreadable image's error is handed out in place of the batch: raised in a worker process, it would reach
        the user wrapped in torch's traceback.
        """
        try:
            return self._fetch(draw)
        except UserError as error:
            return error

    def _fetch(self, draw: Draw) -> dict[str, Any]:
        keys = hashed(key(self.seed, draw.epoch, "augment"), draw.ids)
        images: Tensor | Sequence[Tensor] | Undecoded
        if self.transform is None:
            images = self.source.fetch(draw.ids.tolist())
        elif isinstance(self.held, EncodedImages):  # what is not needed of an image is not decoded
            ids = draw.ids if self.held_ids is None else self.held_ids[draw.ids]
            images = self.transform([self.held.open(id) for id in ids.tolist()], keys)
        else:
            assert isinstance(self.transform, ImageTransform)
            images = self.transform(list(self.source.fetch(draw.ids.tolist())), keys)
        assert isinstance(images, Tensor | Undecoded), "images of different sizes need an ImageTransform"
        batch = {
            "images": images,
            "labels": self.source.labels[draw.ids],
            "ids": draw.ids,
            "keys": keys,
            "weights": draw.weights,
        }
        return batch if self.draws is None else {**batch, "parameters": self.draws(keys, draw.weights)}


def as_it_is(batch: Any) -> Any:
    """A loader's collate_fn: a batch is whole when it is fetched."""
    return batch


# --- How workers are started, by the trainer.


def start_server() -> None:
    """Start the server of this process, unless it runs. Returns at once: it imports torch on its own time.

    To be called as soon as it is clear that workers will be needed; the first of them waits for the imports.
    """
    forkserver.set_forkserver_preload([__name__])
    # The server finds the modules where this process does. By itself it would look into the working directory first,
    # where a file of the user's may have the name of a module.
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    here = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in here}
    # A blocked signal stays blocked in what is started here, and in the workers: SIGTERM would end the server. In this
    # process it comes a moment later.
    blocked = {*STOPS, signal.SIGUSR2}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)  # once more: that has unblocked some
        os.environ.update(here)
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Worker(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 -- multiprocessing's name
        """Starts it. A worker would import this process's main module, for what it is given might come from there:
        the training script, that is, with all that it imports. Nothing does, so it sees an empty one."""
        start_server()
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            return ForkServerProcess._Popen(process_obj)
        finally:
            sys.modules["__main__"] = main


class WorkerContext(ForkServerContext):
    """A DataLoader's `multiprocessing_context`."""

    Process = _Worker

    def __init__(self) -> None:
        super().__init__()
        start_server()  # before a queue is made, which would start the tracker of resources with no signal blocked


@functools.cache
def stacks_file() -> IO[bytes]:
    """Where the workers of this process write the stacks of their threads, upon SIGUSR2."""
    return tempfile.TemporaryFile()


def _end_workers() -> None:
    """At the interpreter's end: multiprocessing would send what is left of them SIGTERM, and wait for ever."""
    workers = [child for child in multiprocessing.active_children() if child.daemon]
    for worker in workers:
        worker.kill()


atexit.register(_end_workers)  # what is registered last runs first: before multiprocessing.util's, imported above


# --- What a worker does first.


class Beginning:
    """A loader's worker_init_fn."""

    def __init__(self) -> None:
        self.stacks = stacks_file()

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.stacks.fileno())

    def __setstate__(self, file: Any) -> None:
        self.stacks = os.fdopen(file.detach(), "wb", buffering=0)

    def __call__(self, _worker: int) -> None:
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
        # faulthandler's own handler needs no Python, and so answers from a worker that is stuck, too.
        faulthandler.register(signal.SIGUSR2, self.stacks, all_threads=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
        threading.Thread(target=_end_with_the_trainer, daemon=True).start()


def _end_with_the_trainer() -> None:
    """torch's worker looks whether its parent is still there. That is the server here, which waits for the worker."""
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    multiprocessing.connection.wait([trainer.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
