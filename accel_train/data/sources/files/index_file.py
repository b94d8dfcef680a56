"""The index of a data set of files, and the safetensors file that keeps it: complete or absent, mapped into memory."""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accel_train.data.sources.shared import MappedArray, MappedFile, SharedArray, StringArray
from accel_train.files import atomic_replacement, file_system, fsync, set_default_permissions
from accel_train.untrusted import LARGEST, parse_json, read_regular_file

VERSION = 3
"""To be raised when an `Index` of the same files changes: other images are found, or other classes."""
DTYPES = {"U8": "<u1", "BOOL": "?", "I64": "<i8", "F64": "<f8"}
"""safetensors' names of data types -> NumPy's."""
NOT_MAPPED = ("nfs", "cifs", "smb", "9p", "fuse")
"""How the names of file systems begin whose files another machine can take away while they are open. To read such a
file that is mapped would end the process (SIGBUS), so it is copied into memory."""
LEFTOVER_SECONDS = 24 * 3600.0
"""A temporary file of this age was left by a process that was killed."""


@dataclass(frozen=True)
class SplitFiles:
    """The images of one split."""

    names: StringArray
    """Relative to the data's root, or to the tar file."""
    labels: torch.Tensor
    """int64 [n], or bool [n, classes]."""
    positions: SharedArray | None = None
    """int64 [n, 3] of images in tar files: the tar file's number, the offset and the size in bytes."""
    stats: SharedArray | None = None
    """int64 [n, 2] of image files: the size in bytes and the time of the last change in ns; -1: not known."""


@dataclass(frozen=True)
class Index:
    """What depends on the files alone, and on no option but data.name and data.root."""

    places: tuple[str, ...]
    """The tar files, tables or folders that were looked through, relative to the root; "": the root itself."""
    classes: tuple[str, ...]
    splits: Mapping[str, SplitFiles]
    tars: tuple[str, ...] = ()
    """The tar files of `SplitFiles.positions`."""
    weights: torch.Tensor | None = None
    """float64 [n], those of a table's training images."""
    table: str = ""
    missing: tuple[str, ...] = ()
    ignored: str = ""
    notes: tuple[str, ...] = ()
    mistake: str = ""
    """The last five as in `Splits`."""
    file: Path | None = None
    """Where it is kept; None: nowhere."""
    unkept: str = ""
    """Why it is kept nowhere: a part of a sentence."""
    was_there: bool = False
    """Whether it was read from its file."""
    states: Mapping[str, str] = field(default_factory=dict)
    """Of each place, when the index was made: what its file says."""

    def __len__(self) -> int:
        return sum(len(files.labels) for files in self.splits.values())


def read_index(file: Path, root: Path) -> Index | None:
    """The index of the data in `root` that `file` has; None if it is absent, damaged or of another version."""
    try:
        header, arrays = _arrays(file)
        about = parse_json(header["index"])
        if about["version"] != VERSION or _checksum(header["index"], arrays) != header["checksum"]:
            return None
        weights = arrays.get("weights")
        splits = {split: _split(arrays, split) for split in about["splits"]}
        _check(about, splits, weights)
        return Index(
            places=tuple(about["states"]),
            classes=tuple(about["classes"]),
            splits=splits,
            tars=tuple(about["tars"]),
            weights=None if weights is None else torch.from_numpy(weights.array),
            table=about["table"],
            ignored=about["ignored"],
            # They name the folder, which may have been copied together with its index.
            notes=tuple(note.replace(about["root"], str(root)) for note in about["notes"]),
            mistake=about["mistake"].replace(about["root"], str(root)),
            file=file,
            was_there=True,
            states=about["states"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, MemoryError):
        return None


def _arrays(file: Path) -> tuple[dict[str, str], dict[str, SharedArray]]:
    """The metadata and the arrays of a safetensors file: the header's length in 8 bytes, the header in JSON, the data.

    safetensors' own reader gives tensors that cannot be passed to workers as what they are, a part of this file.
    """
    file.stat()  # the usual answer, that there is none, costs nothing else
    source: MappedFile | None = None
    if file_system(file.parent).startswith(NOT_MAPPED):
        content: Any = bytearray(read_regular_file(file, LARGEST, follow=True))
    else:
        source = MappedFile(file)
        content = source.bytes
    start = 8 + int.from_bytes(content[:8], "little")
    header = parse_json(bytes(content[8:start]))
    arrays: dict[str, SharedArray] = {}
    metadata: dict[str, str] = header.pop("__metadata__")
    end = start
    for name, entry in header.items():
        dtype, shape, (first, last) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        end = max(end, start + last)
        if source is not None:
            arrays[name] = MappedArray(source, dtype, shape, start + first)
        else:
            count = (last - first) // np.dtype(dtype).itemsize
            arrays[name] = SharedArray(np.frombuffer(content, dtype, count, start + first).reshape(shape))
    if end != len(content):
        raise ValueError("bytes are missing, or follow the data")
    return metadata, arrays


def _checksum(about: str, arrays: Mapping[str, SharedArray]) -> str:
    total = zlib.crc32(about.encode())
    for name in sorted(arrays):
        array = arrays[name].array
        total = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), total)
        total = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, total)
    return str(total)


def _check(about: Mapping[str, Any], splits: Mapping[str, SplitFiles], weights: SharedArray | None) -> None:
    """Raise ValueError unless the parts of an index, which may be somebody else's, are of their kinds and fit."""
    lists = [about[name] for name in ("classes", "tars", "notes", "splits")]
    words = [about[name] for name in ("root", "table", "ignored", "mistake")]
    for values in lists:
        words += values if isinstance(values, list) else [None]
    states = about["states"]
    words += [*states.values()] if isinstance(states, dict) else [None]
    if not all(isinstance(word, str) for word in words) or "train" not in splits:
        raise ValueError("its description is of another kind")
    for files in splits.values():
        labels, positions, count = files.labels.numpy(), files.positions, len(files.labels)
        fits = labels.dtype == np.int64 and labels.shape == (count,) and _is_within(labels, len(about["classes"]))
        fits |= labels.dtype == np.bool_ and labels.shape == (count, len(about["classes"]))
        fits &= files.names.text.dtype == np.uint8 and files.names.ends.shape == (count,)
        fits &= files.names.ends.dtype == np.int64 and _is_within(files.names.ends, files.names.text.size + 1)
        fits &= files.stats is None or files.stats.array.shape == (count, 2)
        if positions is not None:
            fits &= positions.array.shape == (count, 3) and _is_within(positions.array[:, 0], len(about["tars"]))
        if not fits:
            raise ValueError("its arrays do not fit to each other")
    if weights is not None and weights.array.shape != (len(splits["train"].labels),):
        raise ValueError("its weights do not fit to its images")


def _is_within(values: np.ndarray[Any, Any], most: int) -> bool:
    return not values.size or bool(values.min() >= 0 and values.max() < most)


def _split(arrays: Mapping[str, SharedArray], split: str) -> SplitFiles:
    names = StringArray.of(arrays[f"{split}.text"], arrays[f"{split}.ends"])
    labels = torch.from_numpy(arrays[f"{split}.labels"].array)
    return SplitFiles(names, labels, arrays.get(f"{split}.positions"), arrays.get(f"{split}.stats"))


def write_index(files: Sequence[Path], root: Path, index: Index, states: Mapping[str, str]) -> Index:
    """Write the index into the first of `files` that can be written: all of it, or nothing. Return it as it was read
    back, mapped in place of what is in memory; with `unkept` if none can be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = dict(_tensors(index))
    about = {
        "version": VERSION,
        "root": str(root),
        "states": states,
        "classes": index.classes,
        "splits": [*index.splits],
        "tars": index.tars,
        "table": index.table,
        "ignored": index.ignored,
        "notes": index.notes,
        "mistake": index.mistake,
    }
    text = json.dumps(about)
    checksum = _checksum(text, {name: SharedArray(tensor.numpy()) for name, tensor in tensors.items()})
    reasons = []
    for file in files:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(file)
            with atomic_replacement(file) as temporary:
                save_file(tensors, temporary, metadata={"index": text, "checksum": checksum})
                set_default_permissions(temporary)
                fsync(temporary)
            again = read_index(file, root)
            return replace(index if again is None else again, file=file, was_there=False)
        except (OSError, SafetensorError) as error:  # a read-only folder, or a full disk: safetensors has its own error
            reasons.append(f"{file.parent}: {(isinstance(error, OSError) and error.strerror) or error}")
    return replace(index, unkept=f"it cannot be written ({'; '.join(reasons)})")


def _remove_leftovers(file: Path) -> None:
    """Remove what processes that were killed while they wrote this file have left beside it."""
    for left in file.parent.glob(f".{file.name}.*"):
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - LEFTOVER_SECONDS:
                left.unlink()


def _tensors(index: Index) -> Iterator[tuple[str, torch.Tensor]]:
    if index.weights is not None:
        yield "weights", index.weights
    for split, files in index.splits.items():
        yield f"{split}.text", torch.from_numpy(files.names.text)
        yield f"{split}.ends", torch.from_numpy(files.names.ends)
        yield f"{split}.labels", files.labels
        for name, array in (("positions", files.positions), ("stats", files.stats)):
            if array is not None:
                yield f"{split}.{name}", torch.from_numpy(array.array)
