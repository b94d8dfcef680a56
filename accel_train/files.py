"""Files that are the old one or the new one at any moment, whole."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from pathlib import Path


def give_usual_mode(path: Path) -> None:
    """Give a file the permissions that any new file gets there: safetensors makes it readable by its owner alone.

    The umask itself can only be read by changing it, for all threads.
    """
    usual = path.with_name(f".{path.name}.mode")
    usual.touch()
    shutil.copymode(usual, path)
    usual.unlink()


def write_whole(path: Path, text: str) -> None:
    """Write a text file (UTF-8) aside, flush it to the disk and bring it to its place. Raises OSError.

    Missing folders are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """Wait until the disk has a file, or a directory's list of names (fsync). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems know no fsync of a directory; of a file all do.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP, errno.EBADF)):
            raise
    finally:
        os.close(descriptor)
