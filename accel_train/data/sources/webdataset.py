"""Images in WebDataset shards (`wds`): tar files with KEY.jpg beside KEY.cls."""

from __future__ import annotations

import itertools
import json
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accel_train.config.schema import Data
from accel_train.data.sources.folder import ignored_text, is_image
from accel_train.data.sources.index import Index, SplitFiles, StringArray, indexed, splits_of_index
from accel_train.data.sources.splits import SPLIT_NAMES, Splits, names_root
from accel_train.data.sources.tars import Member, TarImages, members_of
from accel_train.data.worker_processes import on_all_cores
from accel_train.errors import UserError
from accel_train.files import read_regular_file

MOST_CLASSES = 1_000_000
LONGEST_LABEL = 1 << 16  # bytes
SEPARATOR = ";"
"""Between several labels of an image, as in a table."""
LISTS = ("_info.json", "info.json")
"""Files that say which shards belong to which split, and may have the names of the classes."""


def webdataset(data: Data, folder: Path | None = None) -> Splits:
    """WebDataset shards in `data.root`: KEY.jpg with KEY.cls.

    Their splits follow from _info.json, if there is one, or else from their names: NAME-train-0000.tar. The names
    of the classes are its `classes`, or else their numbers. `folder`: this node's copy of them. Raises UserError.
    """
    index, root = index_of(data, data.root if folder is None else folder), data.root
    if folder is not None:
        root = names_root(data)
        root = root.parent if (folder / root.name).is_file() else root  # of the only shard
    return splits_of_index(data, index, lambda files: TarImages(root, index.tars, files, data, folder))


def index_of(data: Data, root: Path) -> Index:
    """Raises UserError."""
    return indexed(root, "wds", lambda: _look(root), lambda: _places(root))


def _places(root: Path) -> list[str]:
    """The files that decide what is in the data set; the list of its shards is the first, if there is one."""
    lists = [name for name in LISTS if (root / name).is_file()]
    return lists + [path.relative_to(root).as_posix() for path in root.rglob("*.tar")]


def _look(root: Path) -> Index:
    """Read the headers and labels in all shards. Raises UserError."""
    places = _places(root)
    has_list = bool(places) and places[0] in LISTS
    shards, classes = listed_shards(root / places[0]) if has_list else (named_shards(root, places), ())
    pairs: dict[str, list[tuple[Member, Label]]] = {}
    others: Counter[str] = Counter()
    for split, names in shards.items():
        pairs[split] = []
        for found, others_there in on_all_cores(partial(pairs_in, root), names):
            pairs[split] += found
            others.update(others_there)
    if "train" not in pairs:
        raise UserError(f"--data.root {root}: found no shard (*.tar) of a train split.")
    labels = [label for found in pairs.values() for _, label in found]
    count = 1 + max((label if isinstance(label, int) else max(label, default=-1) for label in labels), default=-1)
    if classes and count > len(classes):
        raise UserError(f"{root}: the labels go up to {count - 1}, but _info.json names {len(classes)} classes.")
    classes = classes or tuple(map(str, range(count)))
    several = any(isinstance(label, tuple) for label in labels)
    tars = sorted({member.tar for found in pairs.values() for member, _ in found})
    number = {tar: i for i, tar in enumerate(tars)}
    splits = {
        split: SplitFiles(
            StringArray([member.name for member, _ in found]),
            _tensor([label for _, label in found], len(classes), several=several),
            torch.tensor([(number[m.tar], m.offset, m.size) for m, _ in found], dtype=torch.int64).view(-1, 3),
        )
        for split, found in pairs.items()
    }
    return Index(tuple(places), classes, splits, tuple(tars), ignored=ignored_text(others))


def _tensor(labels: Sequence[Label], classes: int, *, several: bool) -> torch.Tensor:
    """int64 [n]; or bool [n, classes] if images have `several` labels."""
    if not several:
        return torch.tensor(labels, dtype=torch.int64)
    rows = torch.zeros(len(labels), classes, dtype=torch.bool)
    for row, label in zip(rows, labels, strict=True):
        row[[label] if isinstance(label, int) else list(label)] = True
    return rows


Label = int | tuple[int, ...]
"""The number of a class; or those of an image that may have several or none, which KEY.cls has as "0;2" or ";"."""
Pairs = tuple[list[tuple[Member, Label]], Counter[str]]
"""What is in a shard: see `pairs_in`."""
Listed = tuple[dict[str, list[str]], tuple[str, ...]]
"""split -> paths of its shards, relative to the root; and the names of the classes, () if no file says them."""


def listed_shards(file: Path, text: bytes | None = None) -> Listed:
    """What the `file` lists. `text`: its content; None: it is read. Raises UserError."""
    shards: dict[str, list[str]] = {}
    try:
        info: dict[str, Any] = json.loads(read_regular_file(file, follow=True) if text is None else text)
        for split, about in info["splits"].items():
            if split.lower() in SPLIT_NAMES:
                shards[SPLIT_NAMES[split.lower()]] = list(about["filenames"])
        for path in itertools.chain(*shards.values()):
            if not isinstance(path, str) or path.startswith("/") or ".." in path.split("/"):
                raise ValueError(f"{path!r} is not in this folder")
        classes = info.get("classes", [])
        if not (isinstance(classes, list) and all(isinstance(each, str) for each in classes)):
            raise ValueError("its classes are not a list of names")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{file} does not list shards as splits -> SPLIT -> filenames ({error}): "
            "correct or remove it (then the shards' names give their splits)."
        ) from error
    return shards, tuple(classes)


def named_shards(root: Path, paths: Iterable[str]) -> dict[str, list[str]]:
    """split -> its shards among `paths`, by their names. Raises UserError."""
    shards: dict[str, list[str]] = {}
    for path in sorted(paths):
        words = [SPLIT_NAMES[word] for word in re.split("[^a-z]+", path.lower()) if word in SPLIT_NAMES]
        shards.setdefault(words[-1] if words else "", []).append(path)
    if "" in shards and len(shards) > 1:
        raise UserError(
            f"{root}: {shards[''][0]} has no split (train, val, test) in its name, but other shards have; rename it."
        )
    if "" in shards:
        return {"train": shards[""]}
    return shards


def pairs_in(root: Path, shard: str) -> Pairs:
    """The images of a shard and their labels; and how many samples have a label but another file than an image, by its
    extension. Raises UserError."""
    beside: dict[str, str] = {}
    images: list[Member] = []
    labels: dict[str, Label] = {}
    for member, content in members_of(root, shard):
        key, _, extension = member.name.rpartition(".")
        if extension == "cls":
            text = content.read(LONGEST_LABEL).decode(errors="replace").strip()
            numbers = [part for part in text.split(SEPARATOR) if part] if SEPARATOR in text else [text]
            if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in numbers) or any(
                int(part) >= MOST_CLASSES for part in numbers
            ):
                raise UserError(f"{root / shard}/{member.name}: '{text[:20]}' is not a class number.")
            labels[key] = tuple(map(int, numbers)) if SEPARATOR in text else int(text)
        elif is_image(posixpath.basename(member.name)):
            images.append(member)
        elif extension != "json":
            beside[key] = f".{extension.lower()}"
    pairs: dict[str, tuple[Member, Label]] = {}
    for member in images:
        key = member.name.rpartition(".")[0]
        if key not in labels:
            raise UserError(
                f"{root / shard}/{member.name} has no label; add a file {key}.cls next to it, or leave the image out. "
                "If it is in the folder of its class, unpack the tar files and give --data.name folder."
            )
        if key in pairs:
            raise UserError(
                f"{root / shard}: the sample {key} has several images, {pairs[key][0].name} and {member.name}: keep "
                "one."
            )
        pairs[key] = member, labels[key]
    return [*pairs.values()], Counter(beside.get(key, ".cls") for key in labels if key not in pairs)
