"""What a data set is to the rest of the program, and how its samples are divided into splits.

A division is a pure function of the seed and the set of samples (the key and label of each): every node finds
the same one, in whatever order its file system lists the files, and so does every version of the libraries,
because the lots are drawn by a hash and not by a random number generator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from accel_train.config.schema import Data
from accel_train.config.semantics import IN_MEMORY
from accel_train.errors import UserError


class Source(Protocol):
    """The samples of one split: labels known up front, pixels fetched in batches."""

    labels: torch.Tensor
    """int64 [n], on the CPU."""
    in_memory: bool
    """Pixels are plain tensors: no worker processes are needed."""

    def __len__(self) -> int: ...

    def fetch(self, ids: Sequence[int]) -> torch.Tensor | list[torch.Tensor]:
        """uint8 pixels: one tensor [b, C, H, W] if all images have one size, else a list of [C, H, W].

        Raises UserError if an image cannot be read.
        """

    def name(self, id: int) -> str:
        """What messages call the sample: its path, or "mnist train image 17"."""


@dataclass(frozen=True)
class Splits:
    """A data set, divided. A split that it does not have is None, never the data of another one."""

    classes: tuple[str, ...]
    channels: int
    image_size: int | None
    """Height and width of the images, in pixels; None: files of many sizes."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Of each channel, in 0..1: the set's own, or ImageNet's for image files."""
    train: Source
    validation: Source | None
    test: Source | None
    unreadable: torch.Tensor | None = None
    """bool [n], the samples of `train` that are left out; None: none of them. They keep their numbers, for the order of
    all others depends on these: so an image can be left out in the middle of a run."""
    left_out: int = 0
    """Unreadable images that are left out, of all splits."""
    ignored: str = ""
    """Files of the data's folder that are not used, in words."""
    notes: tuple[str, ...] = ()
    """What the user should be warned of."""
    semantics: int = IN_MEMORY
    """The number by which the pixels are made: see semantics.py."""

    @property
    def to_train_on(self) -> Source:
        """The samples of `train` without those that are left out."""
        return self.train if self.unreadable is None else subset(self.train, ~self.unreadable.numpy())


SPLIT_NAMES = {  # what a folder, a tar file, a shard or a split on a hub may be called
    "train": "train", "training": "train",
    "val": "validation", "valid": "validation", "validation": "validation", "dev": "validation",
    "test": "test", "testing": "test",
}  # fmt: skip


@dataclass
class Subset:
    """Some samples of a source, `ids` (int64 [n]), numbered anew."""

    source: Source
    ids: torch.Tensor
    labels: torch.Tensor = field(init=False)
    in_memory: bool = field(init=False)

    def __post_init__(self) -> None:
        self.labels, self.in_memory = self.source.labels[self.ids], self.source.in_memory

    def __len__(self) -> int:
        return len(self.ids)

    def fetch(self, ids: Sequence[int]) -> torch.Tensor | list[torch.Tensor]:
        return self.source.fetch(self.ids[torch.as_tensor(ids, dtype=torch.int64)].tolist())

    def name(self, id: int) -> str:
        return self.source.name(int(self.ids[id]))


def unwrap_subset(source: Source) -> tuple[Source, torch.Tensor | None]:
    """What holds the samples of `source`, and their numbers there (int64 [n]; None: the same)."""
    return (source.source, source.ids) if isinstance(source, Subset) else (source, None)


def subset(source: Source, chosen: npt.NDArray[np.bool_]) -> Source:
    """The samples of `source` for which `chosen` (bool [n]) is true, in their order."""
    ids = torch.from_numpy(np.flatnonzero(chosen))
    return Subset(source.source, source.ids[ids]) if isinstance(source, Subset) else Subset(source, ids)


def sample_keys(source: Source, root: Path) -> Iterator[str]:
    """What tells each sample from all others of its data set: its name, less that of the folder `root`."""
    return (source.name(id).removeprefix(f"{root}/") for id in range(len(source)))


def stratified_choice(keys: Iterable[str], labels: npt.ArrayLike, count: int, salt: str) -> npt.NDArray[np.bool_]:
    """Draw `count` samples, of each class its share: bool [n], true for those drawn.

    Each sample draws a number, the BLAKE2b hash of `salt` and its key. Within its class it gets a place
    between 0 and 1, by its rank among those numbers; the `count` samples with the lowest places are taken.
    The order of the samples does not matter.
    """
    draws = np.fromiter(
        (
            int.from_bytes(blake2b(f"{salt}\0{key}".encode(errors="surrogateescape"), digest_size=8).digest(), "big")
            for key in keys
        ),
        np.uint64,
    )
    of = np.asarray(labels, dtype=np.int64)
    sizes = np.bincount(of)
    by_class = np.lexsort((draws, of))
    rank = np.empty(len(of), dtype=np.int64)
    rank[by_class] = np.arange(len(of)) - (np.cumsum(sizes) - sizes)[of[by_class]]
    drawn = np.lexsort((draws, (rank + 0.5) / sizes[of]))[:count]
    chosen = np.zeros(len(of), dtype=np.bool_)
    chosen[drawn] = True
    return chosen


def divide(splits: Splits, data: Data, seed: int) -> Splits:
    """Set aside, limit and leave out, in this order, as `data` says: an image that turns out to be unreadable moves no
    other one into another split. Raises UserError."""
    _check(splits, data)
    unreadable = _unreadable(splits, data)
    splits = _set_aside(splits, data, seed)
    for split, limit in (
        ("train", data.train_limit),
        ("validation", data.test_limit),
        ("test", data.test_limit),
    ):
        source: Source | None = getattr(splits, split)
        if source is not None and limit is not None and limit < len(source):
            drawn = stratified_choice(sample_keys(source, data.root), source.labels.numpy(), limit, f"{seed} limit")
            splits = _with(splits, split, subset(source, drawn))
    return _leave_out(splits, unreadable) if unreadable else splits


def _with(splits: Splits, split: str, source: Source | None) -> Splits:
    changed: Any = {split: source}
    return replace(splits, **changed)


def _check(splits: Splits, data: Data) -> None:
    """Raise UserError unless there are two classes and each sample belongs to one of them."""
    where, classes = f"the data '{data.name}' in {data.root}", len(splits.classes)
    if classes < 2:
        only = f"only one class, '{splits.classes[0]}'" if classes else "no class"
        raise UserError(f"{where} has {only}: a classifier needs two or more.")
    for split in ("train", "validation", "test"):
        source: Source | None = getattr(splits, split)
        if source is None:
            continue
        if not len(source):
            raise UserError(f"{where} has no image in its {split} split.")
        outside = torch.nonzero((source.labels < 0) | (source.labels >= classes))
        if len(outside):
            first = int(outside[0])
            raise UserError(
                f"{where} has {len(outside)} labels outside its {classes} classes (0 to {classes - 1}): "
                f"the first is {int(source.labels[first])}, of {source.name(first)}."
            )


def listed_names(data: Data) -> set[str]:
    """The images that --data.skip-unreadable lists, relative to data.root. Raises UserError."""
    assert data.skip_unreadable is not None
    try:
        with data.skip_unreadable.open(encoding="utf-8", errors="surrogateescape") as file:
            return {line.rstrip("\r\n") for line in file} - {""}
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"--data.skip-unreadable: {data.skip_unreadable} cannot be read ({reason}): {_check_command(data)}."
        ) from error


def _check_command(data: Data) -> str:
    return f"`accel-train check-data {data.name} --root {data.root}` writes it"


def _unreadable(splits: Splits, data: Data) -> dict[int, npt.NDArray[np.bool_]]:
    """id of each source that holds samples -> bool [n], those of them that are to be left out."""
    listed = set() if data.skip_unreadable is None else listed_names(data)
    found: dict[int, npt.NDArray[np.bool_]] = {}
    listed_here = 0
    for source in (splits.train, splits.validation, splits.test):
        if source is None:
            continue
        held, ids = unwrap_subset(source)
        marks = found.setdefault(id(held), np.zeros(len(held), dtype=np.bool_))
        if listed:
            chosen = np.fromiter((key in listed for key in sample_keys(source, data.root)), np.bool_, len(source))
            marks[slice(None) if ids is None else ids.numpy()] |= chosen
            listed_here += int(chosen.sum())
        missing: npt.NDArray[np.bool_] | None = getattr(held, "missing", None)
        if missing is not None:
            marks |= missing
    if listed and not listed_here:
        # Some may have been deleted since; that none is there means another folder or another data set.
        raise UserError(
            f"--data.skip-unreadable: none of the {len(listed)} images that {data.skip_unreadable} lists, such as "
            f"'{min(listed)}', is in {data.root}: {_check_command(data)} for this data."
        )
    return found if any(marks.any() for marks in found.values()) else {}


def _leave_out(splits: Splits, unreadable: dict[int, npt.NDArray[np.bool_]]) -> Splits:
    left_out = 0
    for split in ("train", "validation", "test"):
        source: Source | None = getattr(splits, split)
        if source is None:
            continue
        held, ids = unwrap_subset(source)
        gone = unreadable[id(held)] if ids is None else unreadable[id(held)][ids.numpy()]
        left_out += int(gone.sum())
        if not gone.any():
            continue
        if split == "train":
            lost = set(source.labels.tolist()) - set(source.labels[torch.from_numpy(~gone)].tolist())
            if lost:
                names = ", ".join(repr(splits.classes[label]) for label in sorted(lost))
                raise UserError(f"--data.skip-unreadable: the list leaves no training image of class {names}.")
            splits = replace(splits, unreadable=torch.from_numpy(gone))
        else:
            splits = _with(splits, split, None if gone.all() else subset(source, ~gone))
    return replace(splits, left_out=left_out)


def _set_aside(splits: Splits, data: Data, seed: int) -> Splits:
    """Take the test and then the validation split out of the training samples, as shares of all of these."""
    total = len(splits.train)
    for split, option, fraction in (
        ("test", "test-fraction", data.test_fraction),
        ("validation", "val-fraction", data.val_fraction),
    ):
        if not fraction:
            continue
        if getattr(splits, split) is not None:
            raise UserError(
                f"--data.{option} {fraction}: the data '{data.name}' has a {split} split of its own: "
                "leave the option out."
            )
        count = round(fraction * total)
        if not 0 < count < len(splits.train):
            raise UserError(
                f"--data.{option} {fraction} of {total} training images is {count} images, "
                f"which leaves nothing to {'train on' if count else 'evaluate'}: choose another share."
            )
        drawn = stratified_choice(
            sample_keys(splits.train, data.root), splits.train.labels.numpy(), count, f"{seed} {split}"
        )
        splits = replace(_with(splits, split, subset(splits.train, drawn)), train=subset(splits.train, ~drawn))
    return splits
