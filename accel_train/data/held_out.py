"""Checks validation and test images before training begins, so that evaluation does not fail hours later."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from accel_train.data.sources.files.encoded import EncodedImages, depth_notes
from accel_train.data.sources.splits import Source, Splits, unwrap_subset
from accel_train.errors import UserError

MOST = 1000  # images of a split, over all processes: local files take 0.2 s on one core, while the model is created
THREADS = 8  # for network file systems, where opening each file takes long


class HeldOutCheck:
    """Opens validation and test images in background threads, from its creation on.

    All images of a small split are checked, and a sample of a large one; the processes divide them. Only the header is
    read, but a file that does not end with its format's end marker is decoded. One process looks at the values of a few
    training images, too.
    """

    def __init__(self, splits: Splits, process: int, processes: int) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="held-out")
        self._checks = [
            self._pool.submit(_check_image, source, id)
            for source in (splits.validation, splits.test)
            if source is not None and isinstance(unwrap_subset(source)[0], EncodedImages)
            for id in _sample(len(source))[process::processes]
        ]
        self._depth = self._pool.submit(depth_notes, splits.train) if process == 0 else None

    def finish(self, accelerator: Accelerator) -> tuple[str, ...]:
        """Wait for the checks, and return warnings for the user, on the main process. Collective.

        Raises the same UserError on all processes if one of them found an unreadable image.
        """
        self._pool.shutdown()
        own_errors = [str(error) for check in self._checks if (error := check.result())]
        errors = [error for error in gather_object([own_errors[0] if own_errors else ""]) if error]
        if errors:
            raise UserError(errors[0])
        return () if self._depth is None else tuple(self._depth.result())


def _sample(count: int) -> list[int]:
    """Up to MOST evenly spaced numbers below `count`."""
    return torch.linspace(0, count - 1, min(count, MOST), dtype=torch.float64).round().long().tolist()


def _check_image(source: Source, id: int) -> UserError | None:
    """The error that reading this image gives, or None."""
    held, ids = unwrap_subset(source)
    assert isinstance(held, EncodedImages)
    number = id if ids is None else int(ids[id])
    try:
        image = held.open(number)
        if image.looks_truncated():
            image.pixels()
    except UserError as error:
        return error
    return None
