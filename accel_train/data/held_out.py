"""The held-out images tried before training begins: what evaluation would stumble over hours later."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from accel_train.data.sources.encoded import EncodedImages
from accel_train.data.sources.splits import Source, Splits, unwrap_subset
from accel_train.errors import UserError

MOST = 1000  # images of a split, by all processes together: of local files 0.2 s on one core, while the model is made
THREADS = 8  # for a network's file system, where each file is waited for


class HeldOutCheck:
    """Tries to open validation and test images in threads of its own, from its creation on.

    All images of a small split, a sample of a large one, shared by the processes. Only the header is looked at, and a
    file that does not end as its format does is decoded.
    """

    def __init__(self, splits: Splits, process: int, processes: int) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="held-out")
        self._tried = [
            self._pool.submit(_try, source, id)
            for source in (splits.validation, splits.test)
            if source is not None and isinstance(unwrap_subset(source)[0], EncodedImages)
            for id in _sample(len(source))[process::processes]
        ]

    def finish(self, accelerator: Accelerator) -> None:
        """Wait for all; raise the same UserError on all processes if one of them has found an unreadable image.

        Collective.
        """
        self._pool.shutdown()
        errors = [str(error) for tried in self._tried if (error := tried.result())]
        found = [error for error in gather_object([errors[0] if errors else ""]) if error]
        if found:
            raise UserError(found[0])


def _sample(count: int) -> list[int]:
    """Up to MOST of the numbers below `count`, evenly spread."""
    return torch.linspace(0, count - 1, min(count, MOST), dtype=torch.float64).round().long().tolist()


def _try(source: Source, id: int) -> UserError | None:
    held, ids = unwrap_subset(source)
    assert isinstance(held, EncodedImages)
    try:
        image = held.open(id if ids is None else int(ids[id]))
        if image.looks_truncated():
            image.pixels()
    except UserError as error:
        return error
    return None
