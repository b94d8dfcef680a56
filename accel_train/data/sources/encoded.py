"""Sources whose images are encoded files, decoded when they are fetched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from accel_train.errors import UserError

if TYPE_CHECKING:
    pass
from accel_train.data.sources.images import MAX_PIXELS, Box, ImageError, Picture


class EncodedImages(ABC):
    """A source whose images lie somewhere in encoded form (JPEG, PNG, …) and are decoded when fetched."""

    in_memory = False

    def __init__(self, labels: torch.Tensor, channels: int, check_command: str, max_pixels: int = MAX_PIXELS) -> None:
        """labels: int64 [n]. check_command: the command line that finds all unreadable images; max_pixels: of one."""
        self.labels, self.channels, self.check_command = labels, channels, check_command
        self.max_pixels = max_pixels

    @abstractmethod
    def read(self, id: int) -> bytes:
        """The encoded image; raises OSError."""

    @abstractmethod
    def name(self, id: int) -> str: ...

    def states(self) -> Iterable[str]:
        """What is not the same after an image has been changed, such as sizes and times of files. Raises OSError."""
        return ()

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, ids: Sequence[int]) -> torch.Tensor | list[torch.Tensor]:
        return [self.open(int(id)).pixels() for id in ids]

    def open(self, id: int) -> Picture:
        """An image of which only the size is known yet. Raises UserError, as do its `pixels`."""
        try:
            return _SourcePicture(self, id)
        except (ImageError, OSError) as error:
            raise self.unreadable(id, error) from ImageError(_reason(error))

    def unreadable(self, id: int, error: Exception) -> UserError:
        return UserError(
            f"{self.name(id)} cannot be read: {_reason(error)}. `{self.check_command}` lists all such images; "
            "--data.skip-unreadable LIST leaves them out.",
            every_process=False,
        )


class _SourcePicture(Picture):
    def __init__(self, source: EncodedImages, id: int) -> None:
        self.source, self.id = source, id
        super().__init__(source.read(id), source.channels, source.max_pixels)

    def pixels(self) -> torch.Tensor:
        try:
            return super().pixels()
        except ImageError as error:
            raise self.source.unreadable(self.id, error) from error

    def reduced(self, box: Box, height: int, width: int, reduction: int) -> torch.Tensor:
        try:
            return super().reduced(box, height, width, reduction)
        except ImageError as error:
            raise self.source.unreadable(self.id, error) from error


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


class Shared:
    """An array that a process has in common with its data workers: pickled for one, it becomes a tensor, and these
    travel as shared memory. A copy each would take its time, and memory."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        """`array` must be one that can be written to, though nobody does."""
        self.array = array
        self._tensor: torch.Tensor | None = None

    def __getstate__(self) -> torch.Tensor:
        if self._tensor is None:  # the same for all workers: it moves to shared memory with the first
            self._tensor = torch.from_numpy(self.array)
        return self._tensor

    def __setstate__(self, tensor: torch.Tensor) -> None:
        self.array, self._tensor = tensor.numpy(), tensor


class Names:
    """Many strings in two arrays: a list of a million would be copied, in time, into each worker."""

    def __init__(self, names: Sequence[str]) -> None:
        encoded = [name.encode(errors="surrogateescape") for name in names]
        self._text = Shared(np.frombuffer(bytearray(b"".join(encoded)), dtype=np.uint8))
        self._ends = Shared(np.cumsum([len(name) for name in encoded], dtype=np.int64))

    @classmethod
    def of(cls, text: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> Names:
        """Of the two arrays."""
        names = cls([])
        names._text, names._ends = Shared(text), Shared(ends)
        return names

    @property
    def text(self) -> npt.NDArray[np.uint8]:
        """All of them, one behind the other."""
        return self._text.array

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """Where each one ends."""
        return self._ends.array

    def __getitem__(self, id: int) -> str:
        text, ends = self.text, self.ends
        start = ends[id - 1] if id else 0
        return text[start : ends[id]].tobytes().decode(errors="surrogateescape")


def file_state(path: Path) -> str:
    """Size and time of a file; "missing" without it."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return "missing"
    return f"{found.st_size} {found.st_mtime_ns}"


class FileImages(EncodedImages):
    """Image files below a folder."""

    def __init__(
        self,
        root: Path,
        paths: Sequence[str],
        labels: torch.Tensor,
        channels: int,
        check_command: str,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        super().__init__(labels, channels, check_command, max_pixels)
        self.root, self.paths = root, Names(paths)

    def read(self, id: int) -> bytes:
        return (self.root / self.paths[id]).read_bytes()

    def name(self, id: int) -> str:
        return f"{self.root}/{self.paths[id]}"

    def states(self) -> Iterable[str]:
        return (file_state(self.root / self.paths[id]) for id in range(len(self)))
