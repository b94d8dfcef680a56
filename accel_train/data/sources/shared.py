"""Arrays that a process shares with its data workers, so that a million names or positions are in memory once."""

from __future__ import annotations

import mmap
import os
import weakref
import zlib
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from accel_train.data.compat import DupFd
from accel_train.errors import UserError
from accel_train.untrusted import open_regular_file

BLOCK = 1 << 14  # strings of which the bytes are copied at a time


class SharedArray:
    """An array in memory that a process shares with its data workers, without a copy for each.

    It is pickled as a tensor, which torch passes to workers as shared memory.
    """

    def __init__(self, array: npt.NDArray[Any]) -> None:
        """`array` must be writable, as torch requires, but is never changed."""
        self.array = array
        self._tensor: torch.Tensor | None = None

    def __getstate__(self) -> Any:
        if self._tensor is None:  # kept for all workers: the first pickling moves it to shared memory
            self._tensor = torch.from_numpy(self.array)
        return self._tensor

    def __setstate__(self, tensor: Any) -> None:
        self.array, self._tensor = tensor.numpy(), tensor

    def check(self) -> None:
        """Raise UserError if the array is not any more what it was."""


class MappedFile:
    """A file mapped into memory: the system reads it once for all processes of a machine, and drops what nobody uses.

    Workers get the open file, not its name: another file may have that name by now.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError, and ValueError if the file is empty."""
        self.path = path
        self._map(open_regular_file(path, follow=True))
        self._state, self._checksum = self._now(), zlib.crc32(self.bytes)

    def _map(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self.bytes = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)  # writable, as torch requires

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def __getstate__(self) -> Any:
        return self.path, self._state, self._checksum, DupFd(self._descriptor)

    def __setstate__(self, given: Any) -> None:
        self.path, self._state, self._checksum, descriptor = given
        self._map(descriptor.detach())

    def check(self) -> None:
        """Raise UserError if the file has another content than when it was opened. That another file took its name, or
        that it was touched, does no harm."""
        state = self._now()
        if state == self._state:
            return
        if state[0] != self._state[0] or zlib.crc32(self.bytes) != self._checksum:
            raise UserError(
                f"{self.path} was overwritten while this process was using it, so the images that it names are not "
                "known any more: start again when the data is complete.",
                every_process=False,
            )
        self._state = state


class MappedArray(SharedArray):
    """An array in a `MappedFile`, which costs no process any memory."""

    def __init__(self, file: MappedFile, dtype: str, shape: Sequence[int], offset: int) -> None:
        """`dtype`: NumPy's name, such as "<i8"; `offset` in bytes. Raises ValueError if it is not inside the file."""
        self.__setstate__((file, dtype, tuple(shape), offset))

    def __getstate__(self) -> Any:
        return self._place

    def __setstate__(self, place: Any) -> None:
        self._place = file, dtype, shape, offset = place
        self.file = file
        flat = np.frombuffer(file.bytes, dtype, prod(shape), offset) if prod(shape) else np.empty(0, dtype)
        self.array = flat.reshape(shape)

    def check(self) -> None:
        self.file.check()


class StringArray:
    """Many strings in two shared arrays. A list of a million strings would be copied into each worker."""

    def __init__(self, names: Sequence[str]) -> None:
        encoded = [name.encode(errors="surrogateescape") for name in names]
        self._text = SharedArray(np.frombuffer(bytearray(b"".join(encoded)), dtype=np.uint8))
        self._ends = SharedArray(np.cumsum([len(name) for name in encoded], dtype=np.int64))

    @classmethod
    def of(cls, text: SharedArray, ends: SharedArray) -> StringArray:
        """The strings in `text` (uint8), each of which ends where `ends` (int64) says."""
        strings = cls([])
        strings._text, strings._ends = text, ends
        return strings

    @property
    def text(self) -> npt.NDArray[np.uint8]:
        """All strings, one after the other, as bytes."""
        return self._text.array

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """Where each string ends in `text`."""
        return self._ends.array

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, id: int) -> str:
        text, ends = self.text, self.ends
        start = ends[id - 1] if id else 0
        return text[start : ends[id]].tobytes().decode(errors="surrogateescape")

    def __iter__(self) -> Iterator[str]:
        """Faster than one after the other by its number: a million in 0.3 s."""
        for first in range(0, len(self), BLOCK):
            ends = self.ends[first : first + BLOCK].tolist()
            start = int(self.ends[first - 1]) if first else 0
            base, text = start, self.text[start : ends[-1]].tobytes()
            for end in ends:
                yield text[start - base : end - base].decode(errors="surrogateescape")
                start = end

    def check(self) -> None:
        """Raise UserError if the strings are not any more what they were."""
        self._text.check()
