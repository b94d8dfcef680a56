"""Which image files there are: in a tree of folders, or of those that a table lists; their sizes and times."""

from __future__ import annotations

import os
import posixpath
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath

import numpy as np
import numpy.typing as npt

from accel_train.data.all_cores import on_all_cores
from accel_train.data.sources.files.index import Progress
from accel_train.errors import UserError

EXTENSIONS = (
    ".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp",
    ".jfif", ".jpe", ".mpo", ".gif", ".avif", ".apng", ".jp2", ".j2k", ".jpx", ".jpf", ".j2c", ".jpc", ".pbm", ".pnm",
    ".pfm", ".tga", ".qoi", ".dib", ".pcx",
)  # fmt: skip
"""Of the pictures that Pillow reads; other files (Thumbs.db, notes) do not count as images."""


def is_image(name: str) -> bool:
    """Whether a file of this name (the last part of a path) counts as an image."""
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


@dataclass(frozen=True)
class FolderContents:
    """The contents of a folder, or of a tree: then sorted. Paths are relative to it, with "/". Hidden files are
    excluded."""

    images: list[str]
    folders: list[str]
    others: Counter[str]
    """How many other files there are of each extension: {".heic": 12}."""
    links: list[str]
    """Symbolic links to folders; of a tree those that are not followed, because the folders are already included."""
    stats: npt.NDArray[np.int64] = field(compare=False)
    """Of the images, as `SplitFiles.stats` has them."""


def _list(root: Path, folder: str) -> FolderContents:
    """Raises UserError if the folder cannot be read."""
    folders: list[str] = []
    links: list[str] = []
    images: list[str] = []
    stats: list[tuple[int, int]] = []
    others: Counter[str] = Counter()
    try:
        with os.scandir(root / folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if _is_folder(entry):
                    (links if entry.is_symlink() else folders).append(entry.name)
                elif is_image(entry.name):
                    images.append(entry.name)
                    stats.append(entry_stats(entry))
                else:
                    others[PurePath(entry.name).suffix.lower() or entry.name] += 1
    except OSError as error:  # os.walk would continue without the folder
        raise UserError(
            f"the folder {root / folder} cannot be read ({error.strerror}); make it readable or remove it."
        ) from error
    return FolderContents(images, folders, others, links, np.array(stats, dtype=np.int64).reshape(-1, 2))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def entry_stats(entry: os.DirEntry[str]) -> tuple[int, int]:
    """Size and time of a file, as `SplitFiles.stats` has them; of a link those of what it leads to."""
    try:
        status = entry.stat()
    except OSError:  # a link that leads nowhere
        return -1, -1
    return status.st_size, status.st_mtime_ns


def find_images(root: Path, progress: Progress | None = None) -> FolderContents:
    """The images in the tree of `root`; each folder counts once, even if symbolic links also lead to it.

    Raises UserError if a folder cannot be read.
    """
    images: list[str] = []
    stats: list[npt.NDArray[np.int64]] = [np.empty((0, 2), dtype=np.int64)]
    folders: list[str] = []
    others: Counter[str] = Counter()
    repeated: list[str] = []

    def walk(top: str) -> list[str]:
        """Collect the contents of a folder ("": the root), level by level; return the links to folders."""
        links: list[str] = []
        level = [top]
        while level:
            fresh: list[str] = []
            for folder in level:
                real = os.path.realpath(root / folder)
                (repeated if real in seen else fresh).append(folder or ".")
                seen.add(real)
            level = []
            for folder, listing in zip(fresh, on_all_cores(partial(_list, root), fresh), strict=True):
                prefix = "" if folder == "." else folder + "/"
                level += [prefix + name for name in listing.folders]
                links += [prefix + name for name in listing.links]
                images.extend(prefix + name for name in listing.images)
                stats.append(listing.stats)
                others.update(listing.others)
                if progress is not None:
                    progress.images += len(listing.images)
            folders.extend(level)
        return links

    # A link to a parent folder would make a cycle.
    seen = {str(above) for above in Path(os.path.realpath(root)).parents}
    links = walk("")
    while links:  # after all real folders, and in the same order on every machine
        following = sorted(links)
        links = []
        for link in following:
            if os.path.realpath(root / link) not in seen:
                folders.append(link)
                links += walk(link)
            else:
                repeated.append(link)
    order = sorted(range(len(images)), key=images.__getitem__)
    ordered = [images[number] for number in order]
    return FolderContents(ordered, sorted(folders), others, sorted(repeated), np.concatenate(stats)[order])


Stats = tuple[int, int]
"""A row of `SplitFiles.stats`."""
MISSING = (-2, -2)


def file_stats(root: Path, paths: Sequence[str], progress: Progress) -> npt.NDArray[np.int64]:
    """The stats of the files `paths` below `root`, as `SplitFiles.stats` has them; MISSING of what is no file, nor a
    link to one.

    Each folder is listed once: on a network file system, asking for a million single files takes minutes.
    """
    by_folder: dict[str, list[int]] = {}
    for index, path in enumerate(paths):
        by_folder.setdefault(path.rpartition("/")[0], []).append(index)
    folders = [
        (folder, [paths[index].rpartition("/")[2] for index in indices]) for folder, indices in by_folder.items()
    ]
    rows: list[Stats] = []
    for found in on_all_cores(partial(_stats_of, root), folders):
        rows += found
        progress.images = len(rows)
    stats = np.empty((len(paths), 2), dtype=np.int64)
    stats[[index for indices in by_folder.values() for index in indices]] = rows
    return stats


def _stats_of(root: Path, files: tuple[str, Sequence[str]]) -> list[Stats]:
    """Of `files`: a folder, and the names of the files in it."""
    folder, names = root / files[0], files[1]
    try:
        if len(names) > 3:
            wanted = set(names)
            with os.scandir(folder) as entries:
                there = {
                    entry.name: entry_stats(entry) for entry in entries if entry.name in wanted and entry.is_file()
                }
            return [there.get(name, MISSING) for name in names]
    except (FileNotFoundError, NotADirectoryError):
        return [MISSING] * len(names)
    except OSError:  # a folder that may be entered but not listed, say
        pass
    return [_stats_alone(folder / name) for name in names]


def _stats_alone(file: Path) -> Stats:
    try:
        status = file.stat()
    except (OSError, ValueError):  # as of a long name
        return MISSING
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else MISSING


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
