"""The interface of a dataset: the samples of a split (Source), and all splits (Splits)."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from accel_train.config.schema import Data
from accel_train.config.url import folder_of, is_url
from accel_train.data.sources.images import default_mean_std
from accel_train.errors import UserError, first_of
from accel_train.task import Task, task_of


class Source(Protocol):
    """The samples of one split: labels are known at once, pixels are fetched in batches."""

    labels: torch.Tensor
    """On the CPU: int64 [n], or bool [n, classes] if an image may have several labels or none."""
    in_memory: bool
    """Whether pixels are available as tensors, without decoding: no worker processes are needed."""

    def __len__(self) -> int: ...

    def fetch(self, ids: Sequence[int]) -> torch.Tensor | list[torch.Tensor]:
        """Pixels as uint8: one tensor [b, C, H, W] if all images have the same size, else a list of [C, H, W].

        Raises UserError if an image cannot be read.
        """

    def name(self, id: int) -> str:
        """The sample's name in messages: its path, or "mnist train image 17"."""


@dataclass(frozen=True)
class Splits:
    """A dataset with its splits. A missing split is None, never the data of another split."""

    classes: tuple[str, ...]
    channels: int
    image_size: int | None
    """Height and width of the images, in pixels; None: their sizes differ."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Of each channel, in 0..1: the dataset's, or ImageNet's for image files."""
    train: Source
    validation: Source | None
    test: Source | None
    unreadable: torch.Tensor | None = None
    """bool [n], the samples of `train` to skip; None: none. They keep their numbers, because the order of all other
    samples depends on these. So an image can be skipped from the middle of a run on."""
    left_out: int = 0
    """Number of unreadable images that are skipped, in all splits."""
    ignored: str = ""
    """A description of the files in the data's folder that are not used."""
    mistake: str = ""
    """Why it cannot be trained on, although its images can be read and checked; "": it can."""
    missing: tuple[str, ...] = ()
    """The files that a table lists and that are not there, relative to `names_root`: then it has a `mistake`, too."""
    notes: tuple[str, ...] = ()
    """Warnings for the user."""
    table: str = ""
    """SHA-256 of the rows of the table that lists the samples, or for --data.order shards of the division into shards;
    "": neither."""
    full_scale: int = 255
    """The pixel value that `mean` and `std` count as 1: 255 of uint8 images, 1 of float ones."""

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(source)} {split}" for split, source in self.sources.items())
        size = "images" if self.image_size is None else f"images of {self.image_size}x{self.image_size} pixels"
        return (
            f"Splits({len(self.classes)} classes ({first_of(self.classes)}), {self.channels} channels, {counts} {size})"
        )

    @property
    def task(self) -> Task:
        """Whether an image has one label, or may have several or none."""
        return task_of(self.train.labels)

    @property
    def sources(self) -> dict[str, Source]:
        """train, validation and test: those that there are."""
        all_three = {"train": self.train, "validation": self.validation, "test": self.test}
        return {split: source for split, source in all_three.items() if source is not None}

    @property
    def to_train_on(self) -> Source:
        """The samples of `train` without the skipped ones."""
        return self.train if self.unreadable is None else subset(self.train, ~self.unreadable.numpy())


def label_numbers(label: torch.Tensor) -> list[int]:
    """The classes of a sample: one if its label is a number (int64 []), any number of them if it is a row of bools."""
    return label.nonzero()[:, 0].tolist() if label.ndim else [int(label)]


def count_classes(labels: torch.Tensor, classes: int) -> list[int]:
    """Of each class: images that have it as a label. `labels`: int64 [n], or bool [n, classes]."""
    images = labels.sum(0) if labels.ndim == 2 else torch.bincount(labels, minlength=classes)
    counts: list[int] = images.tolist()
    return counts


def numbered(where: str, labels: Collection[torch.Tensor]) -> tuple[str, ...]:
    """The classes of `labels` (int64 [n] or bool [n, classes], of each split) without names: the numbers up to the
    largest label. Raises UserError if these would be more than there are samples."""
    count = max(each.shape[1] if each.ndim == 2 else int(each.max()) + 1 if len(each) else 0 for each in labels)
    if count > max(2, sum(map(len, labels))):
        raise UserError(
            f"{where}: the largest label is {count - 1}, more than there are samples. Labels are the numbers of "
            "classes, from 0 on; give the train dataset `classes`, a list of their names, or `num_classes`."
        )
    return tuple(map(str, range(count)))


def normal_name(name: str) -> str:
    """A class's name in the one form (NFC) of those that look the same: macOS writes é as e and an accent (NFD)."""
    return unicodedata.normalize("NFC", name)


SPLIT_NAMES = {  # accepted names of folders, shards and splits on a hub
    "train": "train", "training": "train",
    "val": "validation", "valid": "validation", "validation": "validation", "dev": "validation",
    "test": "test", "testing": "test",
}  # fmt: skip


def named_splits(stored: Sequence[str], name: str) -> dict[str, str]:
    """split -> its name in the dataset `name` of a hub, of those that are `stored` there. Raises UserError."""
    named = {SPLIT_NAMES[each.lower()]: each for each in reversed(stored) if each.lower() in SPLIT_NAMES}
    if "train" not in named:
        raise UserError(
            f"the data '{name}' has no train split, only {', '.join(stored) or 'none'}; a function of your own may "
            "return splits of other names (docs/own.md)."
        )
    return named


class Subset:
    """The samples `ids` (int64 [n]) of a source, renumbered from 0."""

    def __init__(self, source: Source, ids: torch.Tensor, labels: torch.Tensor | None = None) -> None:
        """`labels`: of these samples, if they are others than the source's."""
        self.source, self.ids, self.in_memory = source, ids, source.in_memory
        self.labels = source.labels[ids] if labels is None else labels

    def __len__(self) -> int:
        return len(self.ids)

    def fetch(self, ids: Sequence[int]) -> torch.Tensor | list[torch.Tensor]:
        return self.source.fetch(self.ids[torch.as_tensor(ids, dtype=torch.int64)].tolist())

    def name(self, id: int) -> str:
        return self.source.name(int(self.ids[id]))


def names_root(data: Data) -> Path:
    """The path to which the names of samples are relative in lists and in the division into splits.

    It is data.root, but the folder of a table, and of the files that a URL with braces names: the same files have the
    same names in the table and in the folder.
    """
    if is_url(data.root):
        return folder_of(data.root)
    return data.root.parent if data.name == "csv" else data.root


def sample_keys(source: Source, root: Path) -> Iterator[str]:
    """The unique key of each sample in its dataset: its name relative to the folder `root`."""
    above = f"{root}/"
    return (source.name(id).removeprefix(above) for id in range(len(source)))


def present_classes(labels: torch.Tensor) -> set[int]:
    """The classes of at least one sample, by `labels` (int64 [n], or bool [n, classes])."""
    return set((labels.any(0) if labels.ndim == 2 else labels.bincount()).nonzero()[:, 0].tolist())


def has_one_size(source: Source) -> bool:
    """Whether all images are tensors of one size, so that none must be resized by itself."""
    held, _ = unwrap_subset(source)
    return bool(getattr(held, "one_size", held.in_memory))


def unwrap_subset(source: Source) -> tuple[Source, torch.Tensor | None]:
    """The source below a Subset, and the samples' numbers in it (int64 [n]; None: unchanged)."""
    return (source.source, source.ids) if isinstance(source, Subset) else (source, None)


def subset(source: Source, chosen: npt.NDArray[np.bool_], labels: torch.Tensor | None = None) -> Source:
    """The samples of `source` for which `chosen` (bool [n]) is true, in their order. `labels`: of all samples of
    `source`, if they become others."""
    ids = torch.from_numpy(np.flatnonzero(chosen))
    labels = (source.labels if labels is None else labels)[ids]
    return Subset(source.source, source.ids[ids], labels) if isinstance(source, Subset) else Subset(source, ids, labels)


def splits_of_files(data: Data, classes: tuple[str, ...], sources: Mapping[str, Source], **more: Any) -> Splits:
    """The splits of image files. `sources`: "train" and, if there are any, "validation" and "test"; `more`: fields of
    `Splits` that are not those of image files of any size as `data` has them."""
    mean, std = default_mean_std(data.channels)
    usual: dict[str, Any] = {"channels": data.channels, "image_size": None, "mean": mean, "std": std}
    return Splits(classes, **({"validation": None, "test": None, **sources, **usual} | more))
