"""Files that are the old one or the new one at any moment, whole."""

from __future__ import annotations

import contextlib
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
