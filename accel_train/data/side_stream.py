"""Copies batches to a CUDA device while it computes.

Accelerate's loader and MemoryLoader start to copy a batch (non-blocking, from pinned memory) when it is requested. By
then the host is ahead of the device, which still has most of the last update to compute. On the stream of that work,
the copy would wait for the work, and the next update for the copy. On a separate stream the copy begins at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class SideStream:
    """Runs a loader's copies on a separate CUDA stream. It does not fetch batches earlier than the loader would."""

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda
        self.device, self.stream = device, cuda.Stream(device)

    def copied(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the same batches (dicts with tensors, or errors). The current stream may use them; the host does not
        wait for the copy."""
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
                        value.record_stream(here)  # the other stream owns the memory and must not reuse it early
            yield batch
            del batch  # so that its memory is free as soon as the caller drops it
