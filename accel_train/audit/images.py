"""All images of a data set, over its splits: their names, splits and classes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from accel_train.data.sources.splits import Source, label_numbers


@dataclass(frozen=True)
class Images:
    """The images of several splits, numbered one split after the other."""

    sources: dict[str, Source]
    """train, val, test: those that there are."""
    classes: tuple[str, ...]
    root: Path
    """The path to which names are relative."""

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """int64 [splits + 1]: the number of the first image of each split, and of all images."""
        return np.cumsum([0, *map(len, self.sources.values())])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def place(self, id: int) -> tuple[str, Source, int]:
        """The split of an image, its source, and its number there."""
        number = int(np.searchsorted(self.starts, id, side="right")) - 1
        split = list(self.sources)[number]
        return split, self.sources[split], id - int(self.starts[number])

    def split(self, id: int) -> str:
        return self.place(id)[0]

    def name(self, id: int) -> str:
        """Its path relative to the data's root, or "mnist train image 17"."""
        _, source, number = self.place(id)
        return source.name(number).removeprefix(f"{self.root}/")

    def label(self, id: int) -> str:
        """The name of its class, or the names of its classes, or "none"."""
        _, source, number = self.place(id)
        labels = label_numbers(source.labels[number])
        names = [self.classes[label] if 0 <= label < len(self.classes) else str(label) for label in labels]
        return ", ".join(names) or "none"

    @cached_property
    def split_numbers(self) -> npt.NDArray[np.int64]:
        """int64 [n]: the number of the split of each image."""
        return np.repeat(np.arange(len(self.sources)), np.diff(self.starts))

    @cached_property
    def label_numbers(self) -> npt.NDArray[np.int64]:
        """int64 [n]: a number for each image that is the same for those with the same class, or the same classes."""
        labels = [source.labels.numpy() for source in self.sources.values()]
        if len({part.shape[1:] for part in labels}) > 1:  # a mistake that is told elsewhere
            return np.zeros(len(self), dtype=np.int64)
        every = np.concatenate(labels)
        if every.ndim == 1:
            return every.astype(np.int64)
        _, numbers = np.unique(np.packbits(every, axis=1), axis=0, return_inverse=True)
        return numbers.reshape(-1).astype(np.int64)

    @cached_property
    def counts(self) -> dict[str, list[int]]:
        """How many images of each class a split has."""
        found = {}
        for split, source in self.sources.items():
            labels = source.labels.numpy()
            if labels.ndim == 2:
                found[split] = [int(count) for count in labels.sum(0)]
            else:
                inside = labels[(labels >= 0) & (labels < len(self.classes))]
                found[split] = np.bincount(inside, minlength=len(self.classes)).tolist()
        return found
