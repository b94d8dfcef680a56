"""Checks of files and values that may be damaged, or come from somebody else, before the program uses them."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LARGEST = 2**62
"""Larger than any count of this program; a larger number would only overflow somewhere."""
MAX_JSON_BYTES = 1 << 26
"""Size of the largest JSON file that is read."""


class NotRegularFileError(OSError):
    """A path that is a link, a pipe or a device, not a regular file."""

    def __str__(self) -> str:
        return f"{self.filename} is {self.strerror}"


def require_regular_file(path: Path, *, follow: bool = False) -> os.stat_result:
    """Return the state of a regular file (with `follow`, also of one that a link points to).

    Raises NotRegularFileError for others, such as a pipe or a device: reading them could block for ever.
    """
    status = path.stat() if follow else path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise NotRegularFileError(errno.EINVAL, f"{_kind(status.st_mode)}, not a regular file", str(path))
    return status


def read_regular_file(path: Path, most: int = MAX_JSON_BYTES, *, follow: bool = False) -> bytes:
    """Return the content of a regular file. Raises OSError, and ValueError if it has more than `most` bytes."""
    if (size := require_regular_file(path, follow=follow).st_size) > most:
        raise ValueError(f"{path} has {size:,} bytes, more than such a file can have")
    return path.read_bytes()


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object in a text; None if the text is not one."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if there is no such file, or if it is damaged."""
    try:
        return json_object(read_regular_file(path, follow=True)) or {}
    except (OSError, ValueError):
        return {}


def read_json_lines(path: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the lines of a file, without damaged lines and one that is being written.

    With `kind` only those whose "kind" it is. A file that is not there has no lines. Raises OSError.
    """
    wanted = b"" if kind is None else f'"kind": "{kind}"'.encode()  # parsing each line of many runs would take long
    try:
        with path.open("rb") as file:
            for line in file:
                values = json_object(line) if wanted in line else None
                if values is not None and (kind is None or values.get("kind") == kind):
                    yield values
    except FileNotFoundError:
        return


def is_number(value: Any, least: float = 0.0, most: float = LARGEST) -> bool:
    """Whether the value is a finite number from `least` to `most`, and not true or false."""
    return type(value) in (int, float) and least <= value <= most


def is_count(value: Any, least: int = 0, most: int = LARGEST) -> bool:
    """Whether the value is a whole number from `least` to `most`, and not true or false."""
    return type(value) is int and least <= value <= most


def is_file_name(text: str) -> bool:
    """Whether the text can name a visible file in a folder: no path, no control characters."""
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
