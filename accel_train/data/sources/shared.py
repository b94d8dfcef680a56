"""Arrays that a process shares with its data workers, so that a million names or positions are in memory once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


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
