"""The list of a data set's unreadable images: `accel-train check-data` writes it, --data.skip-unreadable reads it.

Its first line says of which data set it is, so that no other data set overwrites it or takes it for its own. The other
lines are paths relative to `names_root`; one with a line break is written as in JSON. A list without that line was
written by hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from accel_train.config.schema import Data
from accel_train.config.url import is_url
from accel_train.data.sources.files.encoded import check_command
from accel_train.data.sources.splits import Source, names_root, sample_keys
from accel_train.errors import UserError
from accel_train.files import atomic_write
from accel_train.untrusted import read_regular_file
from accel_train.user_code.reference import short_name

OF_ONE_PLACE = ("folder", "csv", "tar", "wds")
"""Names of data that `data.root` alone says."""
HEAD = "# accel-train check-data: "


@dataclass(frozen=True)
class UnreadableList:
    """The content of a list."""

    paths: set[str]
    name: str = ""
    """--data.name of its data; "": the list does not say it."""
    root: str = ""
    """--data.root, a real path."""
    samples: str = ""
    """The `_digest` of the data."""


def default_list(data: Data) -> Path:
    """Where check-data writes the list, unless the user names a file: it is named after the data's folder or file. Of
    other data, many of which may be in one folder, after its name."""
    if data.name in OF_ONE_PLACE:
        named = data.root if data.name == "csv" else names_root(data)  # without the braces of a URL
        return Path(f"unreadable-{Path(real(named)).name}.txt")
    name = re.sub(r"[^\w.]+", "-", short_name("data.name", data.name)).strip("-")
    return Path(f"unreadable-{name}.txt")


def real(root: Path) -> str:
    """The path without symbolic links; a URL as it is."""
    return str(root) if is_url(root) else os.path.realpath(root)


def read_list(path: Path) -> UnreadableList:
    """Raises OSError."""
    text = read_regular_file(path, follow=True).decode("utf-8", "surrogateescape")
    first, *lines = (line.rstrip("\r") for line in text.split("\n"))
    if not first.startswith(HEAD):
        return UnreadableList({*map(_name, (first, *lines))} - {""})
    try:
        about = json.loads(first.removeprefix(HEAD))
        name, root, samples = (str(about[key]) for key in ("name", "root", "samples"))
    except (ValueError, KeyError, TypeError, RecursionError):  # edited by hand: then it does not say it
        name = root = samples = ""
    return UnreadableList({*map(_name, lines)} - {""}, name, root, samples)


def list_for(data: Data, sources: Iterable[Source]) -> UnreadableList:
    """The list of --data.skip-unreadable. Raises UserError if it cannot be read, or is the list of other data.

    The data may lie in another folder now, or a table may list it. Or images have changed in the same folder.
    """
    assert data.skip_unreadable is not None
    try:
        listed = read_list(data.skip_unreadable)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"--data.skip-unreadable: {data.skip_unreadable} cannot be read ({reason}); "
            f"`{check_command(data)}` writes the list."
        ) from error
    if listed.name:
        made_for = Data(listed.name, Path(listed.root))
        if _folder(made_for) != _folder(data) and listed.samples != _digest(_keys(sources, data)):
            raise UserError(
                f"--data.skip-unreadable: {data.skip_unreadable} is the list of {listed.name} {listed.root}, not of "
                f"{data.name} {data.root}; `{check_command(data)}` writes the list for this data."
            )
    return listed


def check_own_list(path: Path, data: Data, sources: Iterable[Source]) -> None:
    """Raise UserError if the file `path` exists and is not the list of `data`, which may be overwritten."""
    try:
        listed = read_list(path)
    except FileNotFoundError:
        return
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"the list {path} cannot be read ({reason}): give another --output.") from error
    if listed.name:
        if (listed.name, listed.root) != (data.name, real(data.root)):
            raise UserError(
                f"{path} is the list of {listed.name} {listed.root}, not of {data.name} {data.root}: give another "
                "--output, or delete it."
            )
    elif listed.paths and listed.paths.isdisjoint(_keys(sources, data)):
        raise UserError(
            f"{path} exists, and it is not a list of images of {data.name} {data.root}: give another --output, or "
            "delete it."
        )


def write_list(path: Path, data: Data, sources: Iterable[Source], names: Iterable[str]) -> None:
    """Write the `names` of unreadable images, relative to `names_root`. Raises OSError."""
    about = {"name": data.name, "root": real(data.root), "samples": _digest(_keys(sources, data))}
    lines = (HEAD + json.dumps(about), *sorted(map(_line, names)))
    atomic_write(path, "".join(f"{line}\n" for line in lines))


def _line(name: str) -> str:
    """The line of a name: `_name` finds the name in it."""
    return json.dumps(name) if name.startswith('"') or "\n" in name or name.endswith("\r") else name


def _name(line: str) -> str:
    with contextlib.suppress(ValueError):  # written by hand, a name of a file that begins so
        if line.startswith('"') and isinstance(name := json.loads(line), str):
            return name
    return line


def _folder(data: Data) -> tuple[Path, str]:
    """To what the paths are relative: a folder and its tables are one. Of a hub, many data sets are in one folder."""
    return Path(real(names_root(data))), data.name if "/" in data.name else ""


def _keys(sources: Iterable[Source], data: Data) -> list[str]:
    return [key for source in sources for key in sample_keys(source, names_root(data))]


def _digest(keys: list[str]) -> str:
    """Of the paths of all images, wherever their folder is, and however they are divided into splits."""
    return sha256("\0".join(sorted(keys)).encode("utf-8", "surrogateescape")).hexdigest()
