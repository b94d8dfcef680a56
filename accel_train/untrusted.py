"""Look at what a file says before it is believed: it may come from somebody else, or be damaged in a way that fits."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import Any

LARGEST = 2**62
"""No count of ours comes near it; a larger one only overflows somewhere."""
MOST_TEXT = 1 << 26
"""Bytes of the largest JSON file that is read."""


class NotOrdinaryError(OSError):
    """A path names no ordinary file: a link, a pipe, a device."""

    def __str__(self) -> str:
        return f"{self.filename} is {self.strerror}"


def require_ordinary(path: Path, *, follow: bool = False) -> os.stat_result:
    """The state of an ordinary file (`follow`: or of one that a link leads to).

    Raises NotOrdinaryError for others, such as a pipe or a device, which would keep a reader for ever.
    """
    found = path.stat() if follow else path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise NotOrdinaryError(errno.EINVAL, f"{_kind(found.st_mode)}, not an ordinary file", str(path))
    return found


def read_ordinary(path: Path, most: int = MOST_TEXT, *, follow: bool = False) -> bytes:
    """The content of an ordinary file. Raises OSError; ValueError if it has more than `most` bytes."""
    if (size := require_ordinary(path, follow=follow).st_size) > most:
        raise ValueError(f"{path} has {size:,} bytes, more than such a file ever has")
    return path.read_bytes()


def is_number(value: Any, least: float = 0.0, most: float = LARGEST) -> bool:
    """Whether it is a finite number from `least` to `most`, and not true or false."""
    return type(value) in (int, float) and least <= value <= most


def is_count(value: Any, least: int = 0, most: int = LARGEST) -> bool:
    """Whether it is a whole number from `least` to `most`, and not true or false."""
    return type(value) is int and least <= value <= most


def is_file_name(text: str) -> bool:
    """Whether it names something directly inside a folder, and nothing hidden: no path, no control characters."""
    plain = not re.search(r"[/\\\x00-\x1f\x7f]", text) and len(os.fsencode(text)) <= 200
    return plain and bool(text.strip()) and not text.startswith(".")


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "a link",
        stat.S_IFIFO: "a pipe",
        stat.S_IFDIR: "a folder",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")
