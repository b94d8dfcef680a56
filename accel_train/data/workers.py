"""The worker processes that load images: what they do, and how they are started.

Workers are never forked from the trainer, but from a server: a separate process that has only imported what they need
(multiprocessing's "forkserver"; on a CPU too, so that tests there cover what runs on a GPU). A fork copies one thread
and all memory. CUDA and other device drivers do not work in the copy of a process that uses them, and a lock that
another thread holds at that moment (NCCL, gloo, OpenMP, the display) stays locked in the copy for ever. "spawn" is as
safe, but each worker would import torch separately.

What a worker receives is pickled. Tensors are passed as shared memory, one copy for all; `SharedArray` does so
with arrays.
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

from accel_train.data.order.samplers import IndexBatch
from accel_train.data.sources.files.encoded import EncodedImages
from accel_train.data.sources.splits import Source, unwrap_subset
from accel_train.data.sources.user.dataset import UserDataset
from accel_train.data.transforms.device_decoding import EncodedBatch, JpegReader
from accel_train.data.transforms.image import ImageTransform
from accel_train.data.transforms.parameters import AugmentParameters
from accel_train.errors import UserError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Sent to every process of a job. The trainer then saves a checkpoint, for which it still needs its workers."""


class BatchDataset(Dataset[dict[str, Any]]):
    """Loads a whole batch at once. It has no state: each IndexBatch brings its epoch, so a worker process that
    outlives an epoch cannot use the previous one's."""

    def __init__(
        self,
        source: Source,
        transform: ImageTransform | JpegReader | None,
        seed: int,
        draw_parameters: AugmentParameters | None = None,
    ) -> None:
        self.source = source
        self.held, self.held_ids = unwrap_subset(source)
        self.transform = transform
        self.seed = seed
        self.draw_parameters = draw_parameters

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, indices: IndexBatch) -> dict[str, Any] | UserError:
        """A batch: images uint8 [b, C, H, W] or an EncodedBatch; labels, ids and keys int64 [b]; weights float32 [b];
        and the result of `draw_parameters`, if there is one, as "parameters".

        The error of an unreadable image is returned in place of the batch: if a worker process raised it, torch would
        wrap it in a traceback.
        """
        try:
            return self._fetch(indices)
        except UserError as error:
            return error

    def _fetch(self, indices: IndexBatch) -> dict[str, Any]:
        keys = indices.keys(self.seed)
        images: Tensor | Sequence[Tensor] | EncodedBatch
        ids = indices.ids if self.held_ids is None else self.held_ids[indices.ids]
        if isinstance(self.held, UserDataset):
            images = self.held.fetch_seeded(ids.tolist(), keys)
            if self.transform is not None:
                assert isinstance(self.transform, ImageTransform)
                images = self.transform(list(images), keys)
        elif self.transform is None:
            images = self.source.fetch(indices.ids.tolist())
        elif isinstance(self.held, EncodedImages):  # the transform decodes only what it needs of an image
            images = self.transform([self.held.open(id) for id in ids.tolist()], keys)
        else:
            assert isinstance(self.transform, ImageTransform)
            images = self.transform(list(self.source.fetch(indices.ids.tolist())), keys)
        assert isinstance(images, Tensor | EncodedBatch), "images of different sizes need an ImageTransform"
        batch: dict[str, Any] = {
            "images": images,
            "labels": self.source.labels[indices.ids],
            "ids": indices.ids,
            "keys": keys,
            "weights": indices.weights,
        }
        if self.draw_parameters is not None:
            batch["parameters"] = self.draw_parameters(keys, indices.weights)
        return batch


def no_collate(batch: Any) -> Any:
    """A loader's collate_fn: `BatchDataset` returns whole batches."""
    return batch


# --- How the trainer starts workers.


def start_server() -> None:
    """Start this process's server, unless it runs already. Returns at once, while the server imports torch.

    Call it as soon as it is clear that workers will be needed: the first worker waits for the imports. It uses
    multiprocessing's modules `forkserver` and `resource_tracker`, checked with Python 3.11.
    """
    forkserver.set_forkserver_preload([__name__])
    # The server must find modules where this process does. By default it would search the working directory first,
    # where one of the user's files may have the name of a module.
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    variables = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in variables}
    # Processes started here inherit the blocked signals, and so do the workers: SIGTERM would end the server. This
    # process receives such a signal a moment later.
    blocked = {*STOP_SIGNALS, signal.SIGUSR2}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)  # again, because ensure_running() has unblocked some
        os.environ.update(variables)
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Worker(ForkServerProcess):
    """A worker process that does not import the trainer's main module; uses `_Popen`, checked with Python 3.11."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 -- multiprocessing's name
        """Start the worker with an empty main module in place of this process's.

        multiprocessing would import the main module, the training script, in case a pickled object is defined there.
        None is.
        """
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
        start_server()  # before a queue starts the resource tracker with no signal blocked


@functools.cache
def stacks_file() -> IO[bytes]:
    """The file to which this process's workers write their threads' stacks on SIGUSR2."""
    return tempfile.TemporaryFile()


def _end_workers() -> None:
    """Kill remaining workers at exit: multiprocessing would send SIGTERM, which they ignore, and wait for ever."""
    workers = [child for child in multiprocessing.active_children() if child.daemon]
    for worker in workers:
        worker.kill()


atexit.register(_end_workers)  # handlers run in reverse order: this one before multiprocessing.util's, imported above


# --- What a worker does first.


class WorkerInit:
    """A loader's worker_init_fn."""

    def __init__(self) -> None:
        self.stacks = stacks_file()

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.stacks.fileno())

    def __setstate__(self, file: Any) -> None:
        self.stacks = os.fdopen(file.detach(), "wb", buffering=0)

    def __call__(self, _worker: int) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        # faulthandler does not run Python code, so it also works in a worker that hangs.
        faulthandler.register(signal.SIGUSR2, self.stacks, all_threads=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
        threading.Thread(target=_exit_with_trainer, daemon=True).start()


def _exit_with_trainer() -> None:
    """Kill this worker when the trainer ends. torch's own check watches the parent, which is the server here."""
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    multiprocessing.connection.wait([trainer.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
