"""A storage as slow as it is told: the delays of benchmarks/storage.py, in all processes that read together."""

from __future__ import annotations

import fcntl
import struct
import time
from pathlib import Path
from typing import Any

from accel_train.data.sources.files.folder import FileImages
from accel_train.data.sources.files.tars import TarImages

STATE = struct.Struct("qqd")  # requests, bytes, and when the line is free (time.monotonic)


class SlowStorage:
    """Each request waits `latency` seconds, and all of them share a line of `bandwidth` bytes a second."""

    def __init__(self, state: Path, latency: float, bandwidth: float) -> None:
        """`state`: a file that the processes share."""
        self.state, self.latency, self.bandwidth = state, latency, bandwidth
        if not state.exists():
            state.write_bytes(STATE.pack(0, 0, 0.0))

    def request(self, size: int) -> None:
        """Take as long as a request for `size` bytes."""
        with self.state.open("r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            requests, total, free_at = STATE.unpack(file.read())
            now = time.monotonic()
            free_at = max(now, free_at) + size / self.bandwidth
            file.seek(0)
            file.write(STATE.pack(requests + 1, total + size, free_at))
        time.sleep(self.latency + free_at - now)

    def counts(self) -> tuple[int, int]:
        """Requests and bytes until now."""
        requests, total, _ = STATE.unpack(self.state.read_bytes())
        return requests, total


class SlowFiles(FileImages):
    """Image files of a folder on such a storage: a request each."""

    storage: SlowStorage

    def read(self, id: int) -> bytes:
        content = super().read(id)
        self.storage.request(len(content))
        return content


class SlowTars(TarImages):
    """Images inside tar files on such a storage: a request each, because nothing reads ahead or keeps what it read."""

    storage: SlowStorage

    def read(self, id: int) -> bytes:
        content = super().read(id)
        self.storage.request(len(content))
        return content


def slowed(source: Any, storage: SlowStorage) -> None:
    """Let a source of files, of ours, read from this storage."""
    source.__class__ = SlowFiles if isinstance(source, FileImages) else SlowTars
    source.storage = storage
