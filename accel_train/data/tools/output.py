"""What a tool writes, one process at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from accel_train.errors import UserError


@contextlib.contextmanager
def locked(lock: Path, output: str, advice: str = "") -> Iterator[None]:
    """Hold the file `lock`, which is removed at the end. Its folder is created.

    Raises UserError about `output` if another process holds it, and for an OSError of the block; `advice` follows then.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=0):
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
    except Timeout:
        raise UserError(f"{output}: another process is writing it.") from None
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror or error}.{advice}") from error
