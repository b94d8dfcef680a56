"""The division of a dataset's samples into splits.

It is a pure function of the seed and of the samples' keys and labels: every node gets the same one, in whatever order
its file system lists the files. So does every version of the libraries, because a hash and not a random number
generator makes the choice.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from accel_train.config.schema import Data
from accel_train.config.url import is_url
from accel_train.data.sources.images import check_command
from accel_train.data.sources.splits import (
    Source,
    Splits,
    names_root,
    normal_name,
    present_classes,
    sample_keys,
    subset,
)
from accel_train.errors import UserError, first_of, nearest, one_line
from accel_train.files import atomic_write, read_regular_file
from accel_train.user_code import parse_reference, short_name


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
    listed = _listed(splits, data)
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
    return _skip(splits, data, listed) if listed else splits


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


def _listed(splits: Splits, data: Data) -> set[str]:
    """The names of the images to skip. Raises UserError if their list cannot be read, or is of other data."""
    path = data.skip_unreadable
    if path is None:
        return set()
    try:
        listed = read_list(path)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"--data.skip-unreadable: {path} cannot be read ({reason}); `{check_command(data)}` writes the list."
        ) from error
    keys = (key for source in splits.sources.values() for key in sample_keys(source, names_root(data)))
    if listed and listed.isdisjoint(keys):
        raise UserError(
            f"--data.skip-unreadable: none of the {len(listed)} images that {path} lists, such as '{min(listed)}', is "
            f"in {data.root}. `{check_command(data)}` writes the list for this data; without such images remove the "
            "option."
        )
    return listed


def _skip(splits: Splits, data: Data, listed: set[str]) -> Splits:
    """Mark the `listed` training images as unreadable, and remove those of the other splits."""
    left_out = 0
    for split, source in splits.sources.items():
        keys = sample_keys(source, names_root(data))
        skipped = np.fromiter((key in listed for key in keys), np.bool_, len(source))
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
# A line is a path relative to `names_root`. check-data's first line says of which data it is, so that it overwrites no
# other file; a list that was written by hand does not need it.

OF_ONE_PLACE = ("folder", "csv", "wds")
"""Names of data that `data.root` alone says."""
HEAD = "# accel-train check-data: "


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


def read_list(path: Path) -> set[str]:
    """The names in a list. Raises OSError."""
    lines = [line.rstrip("\r") for line in _text(path).split("\n")]
    if lines[0].startswith(HEAD):
        del lines[0]
    return {*lines} - {""}


def check_own_list(path: Path, data: Data) -> None:
    """Raise UserError if the file `path` exists and is not the list of `data`, which may be overwritten."""
    try:
        text = _text(path)
    except FileNotFoundError:
        return
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"the list {path} cannot be read ({reason}): give another --output.") from error
    if text and text.partition("\n")[0] != _head(data):
        raise UserError(
            f"{path} does not begin with '{_head(data)}', as the list of this data does: give another --output, or "
            "delete it."
        )


def write_list(path: Path, data: Data, names: Iterable[str]) -> None:
    """Write the `names` of unreadable images, relative to `names_root`. Raises OSError.

    A name with a line break is left out: its parts could be the names of other images. A training ends at it.
    """
    lines = (_head(data), *sorted(name for name in names if "\n" not in name))
    atomic_write(path, "".join(f"{line}\n" for line in lines))


def _text(path: Path) -> str:
    return read_regular_file(path, follow=True).decode("utf-8", "surrogateescape")


def _head(data: Data) -> str:
    return one_line(f"{HEAD}{data.name} {real(data.root)}")
