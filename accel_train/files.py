"""Writing files so that a reader, or a crash, never sees half of one."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from pathlib import Path


def set_default_permissions(path: Path) -> None:
    """Give a file the permissions of a new file in its folder: safetensors makes files readable by their owner alone.

    An empty file shows these permissions. Reading the umask instead would change it for all threads for a moment.
    """
    empty = path.with_name(f".{path.name}.mode")
    empty.touch()
    shutil.copymode(empty, path)
    empty.unlink()


def atomic_write(path: Path, text: str) -> None:
    """Write a text file (UTF-8): at any moment the path has the old content or the new one. Raises OSError.

    The text is written to a temporary file, flushed to the disk and renamed. Missing folders are created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fsync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems do not support fsync of a folder; all support it of a file.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP, errno.EBADF)):
            raise
    finally:
        os.close(descriptor)
