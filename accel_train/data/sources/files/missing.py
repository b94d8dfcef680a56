"""Finds out which of many files are missing."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

THREADS = 8  # that list folders; for network file systems, where each takes long


def missing_files(root: Path, paths: Sequence[str]) -> list[int]:
    """The indices, sorted, of the `paths` below `root` that are not files, or links to files.

    Each folder is listed once: on a network file system, asking for a million single files takes minutes.
    """
    by_folder: dict[str, list[int]] = {}
    for index, path in enumerate(paths):
        by_folder.setdefault(path.rpartition("/")[0], []).append(index)

    def missing(some: Sequence[tuple[str, list[int]]]) -> list[int]:
        lost = []
        for folder, indices in some:
            names = [paths[index].rpartition("/")[2] for index in indices]
            files = _files(root / folder, names)
            lost += [index for index, name in zip(indices, names, strict=True) if name not in files]
        return lost

    folders = list(by_folder.items())
    size = 1 + len(folders) // (16 * THREADS)  # not one job for each of a million folders
    with ThreadPoolExecutor(THREADS) as pool:
        parts = [folders[first : first + size] for first in range(0, len(folders), size)]
        return sorted(index for lost in pool.map(missing, parts) for index in lost)


def _files(folder: Path, names: Iterable[str]) -> set[str]:
    """Those of `names` that are files, or links to files, in `folder`."""
    wanted = set(names)
    try:
        if len(wanted) > 3:
            with os.scandir(folder) as entries:
                return {entry.name for entry in entries if entry.name in wanted and entry.is_file()}
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except OSError:  # a folder that may be entered but not listed, say
        pass
    return {name for name in wanted if os.path.isfile(folder / name)}  # noqa: PTH113 -- no error for a long name


def why_missing(root: Path, path: str) -> str:
    """A hint on why `path` is not a file, or on what it may mean. Or "".

    A link that leads nowhere, a folder, or a file whose name differs only in its ending or in capital letters.
    """
    if "\\" in path:
        return " Write / instead of \\."
    parts = path.split("/")
    for count in range(1, len(parts) + 1):
        above = "/".join(parts[:count])
        link = root / above
        # Not Path.exists: it raises an error for a link to itself.
        if os.path.islink(link) and not os.path.exists(link):  # noqa: PTH110, PTH114
            return f" '{above}' is a link, and its target {link.readlink()} does not exist."
    if os.path.isdir(root / path):  # noqa: PTH112 -- no error for a long name
        return f" '{path}' is a folder."
    folder, _, name = path.rpartition("/")
    stem = name.partition(".")[0].casefold()
    try:
        names = [file.name for file in (root / folder).iterdir()]
    except OSError:
        return f" There is no folder '{folder}'." if folder else ""
    similar = [other for other in names if other.partition(".")[0].casefold() == stem and other != name]
    return f" Did you mean '{posixpath.join(folder, min(similar))}'?" if similar else ""
