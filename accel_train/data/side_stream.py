"""Copies to a CUDA device beside what it computes.

Accelerate's loader and MemoryLoader start the copy of a batch (non-blocking, from pinned memory) when the batch is
asked for: the host is by then ahead of the device, which has most of the last update still to compute. On the stream of
that work the copy would wait for it, and the next update for the copy. On a stream of its own it begins at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class SideStream:
    """Has a loader's copies made on a CUDA stream of their own. No batch is fetched earlier than without it."""

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda
        self.device, self.stream = device, cuda.Stream(device)

    def copied(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches (dicts with tensors, or errors): the current stream may use them, though the host does not
        wait."""
        iterator, end = iter(batches), object()
        while True:
            with torch.cuda.stream(self.stream):
                batch = next(iterator, end)
            if batch is end:
                return
            here = torch.cuda.current_stream(self.device)
            here.wait_stream(self.stream)
            if isinstance(batch, dict):
                for value in batch.values():
                    if isinstance(value, Tensor) and value.device == self.device:
                        value.record_stream(here)  # its memory belongs to the other one, which must not reuse it early
            yield batch
            del batch  # its memory is free once the caller has let go of it
