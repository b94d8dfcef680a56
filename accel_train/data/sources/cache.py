"""A memory-mapped file of preprocessed images, written by `accel-train cache-data` (see tools/cache_writer.py).

    magic      8 bytes
    images     one after the other: raw pixels (uint8, [H, W, C]), or JPEG
    index      NumPy's .npz: place, size, checksum, label and name of each image, and a description in JSON;
               skipped unreadable images have an entry of size 0, so that the others keep their numbers
    footer     magic, offset and length of the index, its SHA-256

The footer's magic is the version of the format. Version 2 is written only where it is needed: the labels may be bits,
one for each class, if an image may have several, and the training images may have weights.

The footer is written last and verified whenever the file is opened; the checksum of an image is verified when the
image is read for the first time. So a truncated or changed file is always detected.
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import struct
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from accel_train.config.schema import Data
from accel_train.data.sources.files.depth import is_value_range, range_text
from accel_train.data.sources.files.encoded import EncodedImages
from accel_train.data.sources.files.images import LazyImage
from accel_train.data.sources.shared import SharedArray, StringArray
from accel_train.data.sources.splits import Source, Splits, splits_of_files
from accel_train.errors import UserError
from accel_train.untrusted import is_count, is_number, open_to_read

MAGIC = b"ACTRAIN1"
MAGIC_2 = b"ACTRAIN2"  # of the footer of several labels an image
FOOTER = struct.Struct("<8sQQ32s")  # magic, offset of the index, its length, its SHA-256
FORMAT = 2
"""Of caches: one with another number is refused."""
COLUMNS = ("offsets", "sizes", "heights", "widths", "checksums", "labels")


@dataclass(frozen=True)
class Description:
    """The description of a cache, stored as JSON in its index."""

    encoding: str  # raw or jpeg
    short_side: int
    channels: int
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    splits: dict[str, int]  # split -> number of its images; the splits follow one another
    fingerprint: str  # of the source images and the settings
    format: int = FORMAT
    range: tuple[float, float] | None = None  # --data.range of the source images


class CacheFile:
    """A cache opened for reading. When it is pickled for worker processes, they map the same memory."""

    def __init__(self, path: Path) -> None:
        """Raises UserError if the file is incomplete or changed."""
        self.path = path
        self._map: mmap.mmap | None = None
        try:
            with open_to_read(path) as file:
                self.bytes = file.seek(0, io.SEEK_END)
                file.seek(max(0, self.bytes - FOOTER.size))
                magic, index_start, length, digest = FOOTER.unpack(file.read(FOOTER.size))
                if magic not in (MAGIC, MAGIC_2) or index_start + length + FOOTER.size != self.bytes:
                    raise ValueError("its end is missing")
                file.seek(index_start)
                index = file.read(length)
            if hashlib.sha256(index).digest() != digest:
                raise ValueError("its index was changed")
            with np.load(io.BytesIO(index), allow_pickle=False) as arrays:
                described: dict[str, Any] = json.loads(arrays["description"].tobytes())
                self.columns: dict[str, npt.NDArray[Any]] = {name: arrays[name] for name in COLUMNS}
                text, ends = arrays["names"], arrays["name_ends"]
                self.weights: npt.NDArray[Any] | None = arrays.get("weights")
                self.names = StringArray.of(SharedArray(text), SharedArray(ends))
            for name in ("classes", "mean", "std"):
                described[name] = tuple(described[name])
            described["range"] = tuple(described["range"]) if described.get("range") else None
            self.description = Description(**described)
            if self.columns["labels"].dtype == np.uint8:
                self.columns["labels"] = _unpacked(self.columns["labels"], len(self.description.classes))
            self._shared = {name: SharedArray(column) for name, column in self.columns.items()}
            _check(self.description, self.columns, text, ends, self.weights, index_start)
        except OSError as error:
            raise UserError(
                f"--data.root {path} cannot be read ({error.strerror}); name a file that `accel-train cache-data` "
                "wrote."
            ) from error
        except (
            ValueError, KeyError, TypeError, AttributeError, RecursionError, EOFError, MemoryError, OverflowError,
            NotImplementedError, struct.error, zipfile.BadZipFile, zlib.error,
        ) as error:  # fmt: skip
            raise UserError(
                f"--data.root {path} is not a complete cache ({error}); write it again with `accel-train cache-data`."
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None, "columns": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.columns = {name: column.array for name, column in self._shared.items()}

    def at(self, number: int) -> memoryview:
        """The bytes of an image, in the mapped memory of the file. Raises OSError."""
        if self._map is None:
            with open_to_read(self.path) as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # the file itself is never changed
        offset = int(self.columns["offsets"][number])
        return memoryview(self._map)[offset : offset + int(self.columns["sizes"][number])]

    def read_ahead(self) -> None:
        """Read the whole file once, so that it is in the host's page cache for all processes."""
        with open_to_read(self.path, buffering=0) as file:
            while file.read(1 << 24):
                pass


def _check(
    description: Description,
    columns: dict[str, npt.NDArray[Any]],
    text: npt.NDArray[Any],
    ends: npt.NDArray[Any],
    weights: npt.NDArray[Any] | None,
    end: int,
) -> None:
    """Raise ValueError unless index and description describe images inside the file, before byte `end`."""
    splits, channels = description.splits, description.channels
    count = len(columns["offsets"])
    if (
        description.encoding not in ("raw", "jpeg")
        or channels not in (1, 3)
        or not all(isinstance(name, str) for name in description.classes)
        or not all(is_number(value, -1e6, 1e6) for value in description.mean)
        or not all(is_number(value, 0, 1e6) and value > 0 for value in description.std)
        or not len(description.mean) == len(description.std) == channels
        or not is_value_range(description.range)
    ):
        raise ValueError("its description is not valid")
    if "train" not in splits or not set(splits) <= {"train", "validation", "test"}:
        raise ValueError(f"its splits are {', '.join(map(str, splits)) or 'none'}")
    if not all(map(is_count, splits.values())) or sum(splits.values()) != count:
        raise ValueError(f"the sizes of its splits do not add up to its {count} images")
    single = columns["labels"].dtype != np.bool_
    for name, values in {**columns, "names": text, "name_ends": ends}.items():
        if (name != "labels" or single) and (
            values.ndim != 1 or values.dtype != (np.uint8 if name == "names" else np.int64)
        ):
            raise ValueError(f"its {name} are not a one-dimensional array of integers")
        if name != "names" and len(values) != count:
            raise ValueError(f"it has {len(values)} {name} for {count} images")
    offsets, sizes = columns["offsets"], columns["sizes"]
    skipped = (sizes == 0) & (columns["checksums"] == 0)
    if count and not (((sizes > 0) | skipped) & (offsets >= len(MAGIC)) & (offsets <= end - sizes)).all():
        raise ValueError("it lists images outside the file")
    if count and (ends[0] < 0 or (ends[1:] < ends[:-1]).any() or ends[-1] != len(text)):
        raise ValueError("its names are incomplete")
    if description.encoding == "raw":
        heights, widths = columns["heights"], columns["widths"]
        sides = (heights > 0) & (widths > 0) & (heights <= end) & (widths <= end // np.maximum(heights, 1))
        if not (skipped | (sides & (heights * widths * channels == sizes))).all():
            raise ValueError("the sizes of its images are wrong")
    if weights is not None:
        if weights.shape != (splits["train"],) or weights.dtype != np.float64:
            raise ValueError("it does not have one weight for each training image")
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise ValueError("the weights of its images are wrong")


def _unpacked(bits: npt.NDArray[Any], classes: int) -> npt.NDArray[np.bool_]:
    """The labels of version 2, bool [n, classes]. Raises ValueError."""
    if bits.ndim != 2 or bits.shape[1] != -(-classes // 8):
        raise ValueError(f"its labels do not have one bit for each of {classes} classes")
    return np.unpackbits(bits, axis=1, count=classes).astype(np.bool_)


class CachedImages(EncodedImages):
    """One split of a cache."""

    def __init__(self, file: CacheFile, first: int, count: int, data: Data) -> None:
        super().__init__(torch.from_numpy(file.columns["labels"][first : first + count].copy()), data)
        # Its pixels have 8 bits: the range was applied when the cache was written.
        self.channels, self.value_range = file.description.channels, None
        self.file, self.first = file, first
        self.missing = file.columns["sizes"][first : first + count] == 0  # skipped when the cache was written
        self.verified = np.zeros(count, dtype=np.bool_)  # images whose checksum this process has verified

    def at(self, id: int) -> memoryview:
        """The bytes of an image, verified by their checksum. Raises OSError."""
        if self.missing[id]:
            raise OSError("it was skipped when the cache was written")
        data = self.file.at(self.first + id)
        if not self.verified[id]:
            if zlib.crc32(data) != int(self.file.columns["checksums"][self.first + id]):
                raise OSError("it was changed (its checksum is wrong)")
            self.verified[id] = True
        return data

    def read(self, id: int) -> bytes:
        return bytes(self.at(id))

    def states(self) -> Iterable[str]:
        return [self.file.description.fingerprint]

    def open(self, id: int) -> LazyImage:
        if self.file.description.encoding != "raw":
            return super().open(id)
        columns, number = self.file.columns, self.first + id
        try:
            return _RawImage(self.at(id), int(columns["heights"][number]), int(columns["widths"][number]))
        except OSError as error:
            raise self.unreadable(id, error) from error

    def name(self, id: int) -> str:
        return f"{self.file.path}/{self.file.names[self.first + id]}"


class _RawImage(LazyImage):
    """An image that is stored as pixels."""

    def __init__(self, data: memoryview, height: int, width: int) -> None:
        self.bytes, self.height, self.width = data, height, width

    is_deep = False

    def largest_of_16_bits(self) -> None:
        return None

    def looks_truncated(self) -> bool:
        return False

    def pixels(self) -> torch.Tensor:
        values = torch.frombuffer(self.bytes, dtype=torch.uint8)  # no copy: pixels outside the crop are not read
        return values.view(self.height, self.width, -1).permute(2, 0, 1)


def cache(data: Data) -> Splits:
    """The splits in the cache file `data.root`. Raises UserError if it is incomplete."""
    file = CacheFile(data.root)
    description = file.description
    if data.channels == 1 and description.channels != 1:
        raise UserError(f"--data.channels 1: {data.root} contains colour images; cache them with --channels 1.")
    if description.format != FORMAT:
        raise UserError(f"--data.root {data.root} was written by another accel-train; write the cache again.")
    if data.range is not None and data.range != description.range:
        had = "without" if description.range is None else f"with {range_text(description.range)} in place of"
        raise UserError(
            f"--data.range {range_text(data.range)}: {data.root} was written {had} this range; write the cache again "
            f"with --range {range_text(data.range)}, or remove the option."
        )
    sources: dict[str, Source] = {}
    first = 0
    for split, count in description.splits.items():
        sources[split] = CachedImages(file, first, count, data)
        first += count
    return splits_of_files(
        data,
        description.classes,
        sources,
        channels=description.channels,
        mean=description.mean,
        std=description.std,
        train_weights=None if file.weights is None else torch.from_numpy(file.weights.copy()),
        value_range=description.range,
    )
