"""Trees of class folders, as ImageFolder reads them: train/ val/ test/, or one tree that is divided later."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath

import numpy as np
import numpy.typing as npt
import torch

from accel_train.config.checks import check_root
from accel_train.config.schema import Data
from accel_train.data.sources.images import EncodedImages, read_image
from accel_train.data.sources.index import Index, SplitFiles, StringArray, indexed, splits_of_index
from accel_train.data.sources.splits import SPLIT_NAMES, Splits, normal_name
from accel_train.data.worker_processes import on_all_cores
from accel_train.errors import UserError, first_of


class FileImages(EncodedImages):
    """Image files below a folder."""

    def __init__(self, root: Path, files: SplitFiles, data: Data) -> None:
        super().__init__(files.labels, data)
        self.root, self.paths = root, files.names

    def read(self, id: int) -> bytes:
        return read_image(self.root / self.paths[id])

    def name(self, id: int) -> str:
        path = self.paths[id]  # a table may have absolute ones
        return path if path.startswith("/") else f"{self.root}/{path}"


def folder(data: Data) -> Splits:
    """The images in the tree of `data.root`. Raises UserError."""
    return splits_of_index(data, index_of(data), lambda files: FileImages(data.root, files, data))


def index_of(data: Data) -> Index:
    """Raises UserError."""
    check_root(data)
    return indexed(data.root, "folder", lambda: _look(data.root))


def _look(root: Path) -> Index:
    """Look through the tree of `root`. Raises UserError."""
    contents = find_images(root)
    if not contents.images:
        others = f"; found {ignored_text(contents.others)}" if contents.others else ""
        raise UserError(f"--data.root {root} contains no image (searched for {' '.join(EXTENSIONS)}{others}).")
    classes, splits, mistake = arrange(contents.images, contents.folders, str(root))
    return Index(
        places=("", *contents.folders),
        classes=classes,
        splits=splits,
        ignored=ignored_text(contents.others, len(contents.images) - sum(len(each.names) for each in splits.values())),
        mistake=mistake,
    )


def ignored_text(others: Counter[str], outside: int = 0) -> str:
    """A description of unused files: "3 images outside the class folders, 12 .heic, 1 .db"."""
    parts = [f"{outside} image{'s' * (outside > 1)} outside the class folders"] if outside else []
    parts += [f"{count} {ending}" for ending, count in others.most_common(5)]
    rest = others.total() - sum(count for _, count in others.most_common(5))
    return ", ".join(parts + [f"{rest} others"] * (rest > 0))


def arrange(
    images: Iterable[str], folders: Iterable[str], where: str
) -> tuple[tuple[str, ...], dict[str, SplitFiles], str]:
    """Classes and splits of a tree, and its `Splits.mistake`: classes without a training image.

    images, folders: paths relative to the tree's root `where`, with "/". The classes are the sorted folders
    in train/, or at the top if there is no train/. Raises UserError if splits differ in their classes.
    """
    folders, named = sorted(folders), dict[str, str]()  # split -> its folder
    for top in folders:
        split = SPLIT_NAMES.get(top.lower())
        if split is None or not any(path.startswith(top + "/") for path in folders):
            continue
        if split in named:
            raise UserError(
                f"{where} has both {named[split]}/ and {top}/; only one can be the {split} split: rename the other."
            )
        named[split] = top
    if named and "train" not in named:
        others = " and ".join(f"{top}/" for top in named.values())
        raise UserError(
            f"{where} has {others}, but no train/: there are no training images. To evaluate a run on one of these "
            f"folders, give --data.root {where}/{next(iter(named.values()))} --split train."
        )

    prefixes = {split: top + "/" for split, top in named.items()} or {"train": ""}
    classes: tuple[str, ...] = ()
    splits: dict[str, SplitFiles] = {}
    for split in sorted(prefixes, key=list(SPLIT_NAMES.values()).index):  # train first: it defines the classes
        prefix = prefixes[split]
        class_folders = {
            path.removeprefix(prefix) for path in folders if path.startswith(prefix) and "/" not in path[len(prefix) :]
        }
        if split == "train":
            classes = tuple(sorted(class_folders))
        elif class_folders != set(classes):
            raise UserError(
                f"{where}/{prefix} has different classes from {prefixes['train']}: "
                f"{_difference(class_folders, classes)}."
            )
        splits[split] = _samples(images, prefix, classes)
    # Other splits may have classes without images.
    empty = set(range(len(classes))) - set(splits["train"].labels.tolist())
    mistake = ""
    if empty:
        mistake = (
            f"{len(empty)} of {len(classes)} class folders of {where}/{prefixes['train']} have no image: "
            f"{_some([classes[label] for label in sorted(empty)])}. Fill or remove them "
            f"(searched for {' '.join(EXTENSIONS)})."
        )
    return classes, splits, mistake


def _difference(folders: set[str], classes: tuple[str, ...]) -> str:
    extra, missing = sorted(folders - set(classes)), sorted(set(classes) - folders)
    parts = [f"it also has {_some(extra)}"] if extra else []
    parts += [f"it lacks {_some(missing)} (if this is intended, make empty folders)"] if missing else []
    if {normal_name(name) for name in extra} & {normal_name(name) for name in missing}:
        parts.append("some names are spelt with other characters that look the same (NFC and NFD): rename one")
    return " and ".join(parts)


def _some(names: list[str]) -> str:
    return first_of([repr(name) for name in names], 5)


def _samples(images: Iterable[str], prefix: str, classes: tuple[str, ...]) -> SplitFiles:
    label_of = {name: label for label, name in enumerate(classes)}
    paths: list[str] = []
    labels: list[int] = []
    for path in images:
        if path.startswith(prefix):
            name, inside, _ = path[len(prefix) :].partition("/")
            if inside:  # an image next to the class folders has no class
                paths.append(path)
                labels.append(label_of[name])
    return SplitFiles(StringArray(paths), torch.tensor(labels, dtype=torch.int64))


# Which image files there are: in a tree of folders, or of those that a table lists.


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


def _list(root: Path, folder: str) -> FolderContents:
    """Raises UserError if the folder cannot be read."""
    folders: list[str] = []
    images: list[str] = []
    others: Counter[str] = Counter()
    try:
        with os.scandir(root / folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if _is_folder(entry):
                    folders.append(entry.name)
                elif is_image(entry.name):
                    images.append(entry.name)
                else:
                    others[PurePath(entry.name).suffix.lower() or entry.name] += 1
    except OSError as error:  # os.walk would continue without the folder
        raise UserError(
            f"the folder {root / folder} cannot be read ({error.strerror}); make it readable or remove it."
        ) from error
    return FolderContents(images, folders, others)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def find_images(root: Path) -> FolderContents:
    """The images in the tree of `root`, level by level; symbolic links to folders are followed.

    Raises UserError if a folder cannot be read, or a link leads to a folder above it.
    """
    images: list[str] = []
    folders: list[str] = []
    others: Counter[str] = Counter()
    level = {"": frozenset({os.path.realpath(root)})}  # folder -> it and those above it, without links
    while level:
        below: dict[str, frozenset[str]] = {}
        for (folder, above), listing in zip(
            level.items(), on_all_cores(partial(_list, root), list(level)), strict=True
        ):
            prefix = f"{folder}/" if folder else ""
            for name in listing.folders:
                real = os.path.realpath(root / folder / name)
                if real in above:
                    raise UserError(f"{root / folder / name} is a link to a folder that it is in: remove it.")
                below[prefix + name] = above | {real}
            images += [prefix + name for name in listing.images]
            others.update(listing.others)
        folders += below
        level = below
    return FolderContents(sorted(images), sorted(folders), others)


def existing_files(root: Path, paths: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Which of `paths` below `root` are files, or links to one: bool [n].

    Each folder is listed once: on a network file system, asking for a million single files takes minutes.
    """
    by_folder: dict[str, list[int]] = {}
    for index, path in enumerate(paths):
        by_folder.setdefault(path.rpartition("/")[0], []).append(index)
    folders = [
        (folder, [paths[index].rpartition("/")[2] for index in indices]) for folder, indices in by_folder.items()
    ]
    are_files = np.empty(len(paths), dtype=np.bool_)
    for indices, are_there in zip(by_folder.values(), on_all_cores(partial(_are_files, root), folders), strict=True):
        are_files[indices] = are_there
    return are_files


def _are_files(root: Path, files: tuple[str, Sequence[str]]) -> list[bool]:
    """Of `files`: a folder, and the names of the files in it."""
    folder, names = root / files[0], files[1]
    try:
        if len(names) > 3:
            wanted = set(names)
            with os.scandir(folder) as entries:
                there = {entry.name for entry in entries if entry.name in wanted and entry.is_file()}
            return [name in there for name in names]
    except OSError:  # it is no folder, or one that may be entered but not listed
        pass
    return [_is_file(folder / name) for name in names]


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except (OSError, ValueError):  # as of a long name
        return False
