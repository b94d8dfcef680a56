"""The division of a dataset's samples into splits.

It is a pure function of the seed and of the samples' keys and labels: every node gets the same one, in whatever order
its file system lists the files. So does every version of the libraries, because a hash and not a random number
generator makes the choice.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from accel_train.config.schema import Data
from accel_train.config.url import is_url
from accel_train.data.sources.files.encoded import check_command
from accel_train.data.sources.splits import (
    Source,
    Splits,
    names_root,
    normal_name,
    present_classes,
    sample_keys,
    subset,
    unwrap_subset,
)
from accel_train.errors import UserError, first_of, nearest
from accel_train.files import atomic_write
from accel_train.untrusted import read_regular_file
from accel_train.user_code.reference import parse_reference, short_name


def stratified_choice(keys: Iterable[str], labels: npt.ArrayLike, count: int, salt: str) -> npt.NDArray[np.bool_]:
    """Choose `count` samples, proportionally from each class: bool [n], true for those chosen.

    Each sample gets a number, the BLAKE2b hash of `salt` and its key. Its rank among the numbers of its class gives it
    a position between 0 and 1; the `count` samples with the lowest positions are chosen. The order of the samples does
    not matter. `labels`: int64 [n], or bool [n, classes]: then a sample counts as its rarest class.
    """
    salted = blake2b(f"{salt}\0".encode(errors="surrogateescape"), digest_size=8)

    def digest(key: str) -> bytes:
        hashed = salted.copy()
        hashed.update(key.encode(errors="surrogateescape"))
        return hashed.digest()

    hashes = np.frombuffer(b"".join(map(digest, keys)), dtype=">u8").astype(np.uint64)
    classes = np.asarray(labels)
    if classes.ndim == 2:
        # A last class for samples without a label.
        counts = np.append(classes.sum(0), len(classes))
        with_none = np.column_stack([classes, np.ones(len(classes), dtype=np.bool_)])
        classes = np.where(with_none, counts, len(classes) + 1).argmin(1)
    classes = classes.astype(np.int64)
    sizes = np.bincount(classes)
    by_class = np.lexsort((hashes, classes))
    rank = np.empty(len(classes), dtype=np.int64)
    rank[by_class] = np.arange(len(classes)) - (np.cumsum(sizes) - sizes)[classes[by_class]]
    lowest = np.lexsort((hashes, (rank + 0.5) / sizes[classes]))[:count]
    chosen = np.zeros(len(classes), dtype=np.bool_)
    chosen[lowest] = True
    return chosen


def divide(splits: Splits, data: Data, seed: int) -> Splits:
    """Choose classes, and split off, limit and skip samples, in this order, as `data` says. Raises UserError.

    Because of this order, an unreadable image does not move another image into a different split.
    """
    _check(splits, data)
    listed: UnreadableList | None = None
    if data.skip_unreadable is not None:
        listed = list_for(data)
        if not (listed.name or listed.paths):
            note = f"--data.skip-unreadable: {data.skip_unreadable} is empty, and does not say of which data it is"
            splits = replace(splits, notes=(*splits.notes, note))
    unreadable = _unreadable(splits, data, listed)
    if data.only_classes:
        splits = _choose_classes(splits, data)
        _check(splits, data)
    splits = _tell_empty_classes(splits)
    splits = _split_off(splits, data, seed)
    for split, source in splits.sources.items():
        limit = data.train_limit if split == "train" else data.test_limit
        if limit is not None and limit < len(source):
            keys = sample_keys(source, names_root(data))
            splits = _choose(splits, split, stratified_choice(keys, source.labels.numpy(), limit, f"{seed} limit"))
    return _skip(splits, unreadable) if unreadable else splits


def _choose_classes(splits: Splits, data: Data) -> Splits:
    """The splits with the images of the `only_classes` of `data`, which become the classes 0, 1, …

    An image with several labels stays, also if all of them are of other classes. Raises UserError.
    """
    names = data.only_classes
    if twice := sorted(name for name, times in Counter(names).items() if times > 1):
        raise UserError(f"--data.only-classes: names {first_of(list(map(repr, twice)))} twice.")
    known = set(splits.classes)
    if unknown := next((name for name in names if name not in known), None):
        raise UserError(
            f"--data.only-classes: there is no class {unknown!r}.{nearest(unknown, splits.classes)} (the data has the "
            f"classes {first_of(list(map(repr, splits.classes)), 5)})"
        )
    position = {name: label for label, name in enumerate(names)}
    new_labels = torch.tensor([position.get(name, -1) for name in splits.classes], dtype=torch.int64)
    changed: dict[str, Any] = {}
    for split, source in splits.sources.items():
        if source.labels.ndim == 2:
            labels = torch.zeros(len(source), len(names), dtype=torch.bool)
            labels[:, new_labels[new_labels >= 0]] = source.labels[:, new_labels >= 0]
            kept = torch.ones(len(source), dtype=torch.bool)
        else:
            labels = new_labels[source.labels]
            kept = labels >= 0
        changed[split] = subset(source, kept.numpy(), labels)
    return replace(splits, classes=names, **changed)


def _with(splits: Splits, split: str, source: Source | None) -> Splits:
    """A copy of `splits` in which `split` is `source`."""
    changed: Any = {split: source}
    return replace(splits, **changed)


def _choose(splits: Splits, split: str, chosen: npt.NDArray[np.bool_]) -> Splits:
    """A copy of `splits` whose `split` has only the samples for which `chosen` (bool [n]) is true."""
    return _with(splits, split, subset(getattr(splits, split), chosen))


def _check(splits: Splits, data: Data) -> None:
    """Raise UserError unless there are two or more classes and each sample belongs to one of them."""
    where, classes = f"the dataset '{data.name}' in {data.root}", len(splits.classes)
    if parse_reference("data.name", data.name):  # its function may not use data.root
        where = f"the dataset '{short_name('data.name', data.name)}'"
    if classes < 2:
        only = f"only one class, '{splits.classes[0]}'" if classes else "no class"
        raise UserError(f"{where} has {only}, but a classifier needs two or more.")
    first_with: dict[str, str] = {}
    for name in splits.classes:
        other = first_with.setdefault(normal_name(name), name)
        if other != name:
            raise UserError(
                f"{where} has two classes of the same name, {other!a} and {name!a}, spelt with other "
                "characters (NFC and NFD): give both one spelling."
            )
    for split, source in splits.sources.items():
        if not len(source):
            raise UserError(f"{where} has no image in its {split} split.")
        if source.labels.ndim != splits.train.labels.ndim:
            raise UserError(f"{where} has one label an image in some splits, and rows of labels in others.")
        if source.labels.ndim == 2:
            if source.labels.shape[1] != classes:
                raise UserError(
                    f"{where} has labels for {source.labels.shape[1]} classes, but the names of {classes} classes."
                )
            continue
        outside = torch.nonzero((source.labels < 0) | (source.labels >= classes))
        if len(outside):
            first = int(outside[0])
            raise UserError(
                f"{where} has {len(outside)} labels outside its {classes} classes (0 to {classes - 1}): "
                f"the first is {int(source.labels[first])}, of {source.name(first)}."
            )


def _tell_empty_classes(splits: Splits) -> Splits:
    """A copy of `splits` with a note if classes have no training image, as with labels that count from 1."""
    empty = sorted(set(range(len(splits.classes))) - present_classes(splits.train.labels))
    if not empty or splits.mistake:
        return splits
    names = first_of([repr(splits.classes[label]) for label in empty], 5)
    note = (
        f"{len(empty)} of {len(splits.classes)} classes have no training image: {names}; the model learns them as "
        "never right. Labels count from 0"
    )
    return replace(splits, notes=(*splits.notes, note))


def _unreadable(splits: Splits, data: Data, listed: UnreadableList | None) -> dict[int, npt.NDArray[np.bool_]]:
    """Python id of each source below a Subset -> bool [n], its samples to skip."""
    marked: dict[int, npt.NDArray[np.bool_]] = {}
    listed_here = 0
    for source in splits.sources.values():
        held, ids = unwrap_subset(source)
        marks = marked.setdefault(id(held), np.zeros(len(held), dtype=np.bool_))
        if listed is not None and listed.paths:
            chosen = np.fromiter(
                (key in listed.paths for key in sample_keys(source, names_root(data))), np.bool_, len(source)
            )
            marks[slice(None) if ids is None else ids.numpy()] |= chosen
            listed_here += int(chosen.sum())
    if listed is not None and listed.paths and not listed_here and not listed.name:
        # Some may have been deleted since; but if none is there, the list is of another folder or dataset.
        raise UserError(
            f"--data.skip-unreadable: none of the {len(listed.paths)} images that {data.skip_unreadable} lists, "
            f"such as '{min(listed.paths)}', is in {data.root}; `{check_command(data)}` writes the list for this data."
        )
    return marked if any(marks.any() for marks in marked.values()) else {}


def _skip(splits: Splits, unreadable: dict[int, npt.NDArray[np.bool_]]) -> Splits:
    """Mark unreadable training images, and remove those of the other splits."""
    left_out = 0
    for split, source in splits.sources.items():
        held, ids = unwrap_subset(source)
        skipped = unreadable[id(held)] if ids is None else unreadable[id(held)][ids.numpy()]
        left_out += int(skipped.sum())
        if not skipped.any():
            continue
        if split == "train":
            lost = present_classes(source.labels) - present_classes(source.labels[torch.from_numpy(~skipped)])
            if lost:
                names = ", ".join(repr(splits.classes[label]) for label in sorted(lost))
                raise UserError(
                    f"--data.skip-unreadable: the list contains all training images of class {names}; check them."
                )
            splits = replace(splits, unreadable=torch.from_numpy(skipped))
        else:
            splits = _with(splits, split, None) if skipped.all() else _choose(splits, split, ~skipped)
    return replace(splits, left_out=left_out)


def _split_off(splits: Splits, data: Data, seed: int) -> Splits:
    """Split the test and then the validation samples off the training samples, as fractions of all of these."""
    total = len(splits.train)
    for split, option, fraction in (
        ("test", "test-fraction", data.test_fraction),
        ("validation", "val-fraction", data.val_fraction),
    ):
        if not fraction:
            continue
        if getattr(splits, split) is not None:
            raise UserError(
                f"--data.{option} {fraction}: the dataset '{data.name}' already has a {split} split; remove the option."
            )
        count = round(fraction * total)
        if not 0 < count < len(splits.train):
            raise UserError(
                f"--data.{option} {fraction} of {total} training images is {count} images, "
                f"which leaves nothing to {'train on' if count else 'evaluate'}; choose another fraction."
            )
        drawn = stratified_choice(
            sample_keys(splits.train, names_root(data)), splits.train.labels.numpy(), count, f"{seed} {split}"
        )
        splits = _choose(_with(splits, split, subset(splits.train, drawn)), "train", ~drawn)
    return splits


# The list of a data set's unreadable images: `accel-train check-data` writes it, --data.skip-unreadable reads it.
#
# Its first line says of which data set it is, so that no other data set overwrites it or takes it for its own. The
# other lines are paths relative to `names_root`; one with a line break is written as in JSON. A list without that line
# was written by hand.

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
        name, root = str(about["name"]), str(about["root"])
    except (ValueError, KeyError, TypeError, RecursionError):  # edited by hand: then it does not say it
        name = root = ""
    return UnreadableList({*map(_name, lines)} - {""}, name, root)


def list_for(data: Data) -> UnreadableList:
    """The list of --data.skip-unreadable. Raises UserError if it cannot be read, or is the list of other data; a folder
    and the tables in it are one."""
    assert data.skip_unreadable is not None
    try:
        listed = read_list(data.skip_unreadable)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"--data.skip-unreadable: {data.skip_unreadable} cannot be read ({reason}); "
            f"`{check_command(data)}` writes the list."
        ) from error
    if listed.name and _folder(Data(listed.name, Path(listed.root))) != _folder(data):
        raise UserError(
            f"--data.skip-unreadable: {data.skip_unreadable} is the list of {listed.name} {listed.root}, not of "
            f"{data.name} {data.root}; `{check_command(data)}` writes the list for this data. If it is the same data "
            "in another place, remove the list's first line."
        )
    return listed


def check_own_list(path: Path, data: Data) -> None:
    """Raise UserError if the file `path` exists and is not the list of `data`, which may be overwritten."""
    try:
        listed = read_list(path)
    except FileNotFoundError:
        return
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"the list {path} cannot be read ({reason}): give another --output.") from error
    if (listed.name, listed.root) != (data.name, real(data.root)) and (listed.name or listed.paths):
        of = f"is the list of {listed.name} {listed.root}" if listed.name else "does not say of which data it is"
        raise UserError(f"{path} {of}, not of {data.name} {data.root}: give another --output, or delete it.")


def write_list(path: Path, data: Data, names: Iterable[str]) -> None:
    """Write the `names` of unreadable images, relative to `names_root`. Raises OSError."""
    lines = (HEAD + json.dumps({"name": data.name, "root": real(data.root)}), *sorted(map(_line, names)))
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
