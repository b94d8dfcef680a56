"""When the index of a data set is used, and when it is made: what a look through its files found, for the next start.

Reading the headers of a tar file with a million images takes a minute, and listing a million files on a network file
system longer. The index is one file, hidden beside the data. It is complete or absent, made by one
process while the others wait, and used as long as the data has not changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from accel_train.config.schema import Data
from accel_train.data.sources.splits import Source, Splits, splits_of_files
from accel_train.errors import LOGGER
from accel_train.files import LARGEST, atomic_replacement, fsync, parse_json, read_regular_file, set_default_permissions

SETTLED_SECONDS = 2.0
"""A file system's clock may tick once in two seconds. What has changed since then may change again unnoticed."""
LOCK_SECONDS = 3600.0
"""How long a process waits for another one's index before it looks through the data itself."""
SLOW_SECONDS = 5.0
"""After this time the user is told what takes so long."""


def index_places(root: Path, kind: str) -> tuple[Path, Path]:
    """The file for the index of the data in `root`, beside it, and that for a folder that is read-only."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "accel_train" / "indexes"
    hidden = index_name(kind)
    beside = root / hidden if root.is_dir() else root.with_name(f".{root.name}{hidden}")
    return beside, caches / f"{hashlib.sha256(os.fsencode(root.absolute())).hexdigest()[:32]}-{hidden[1:]}"


def index_name(kind: str) -> str:
    """The name of the index in a folder of data, here or on a storage."""
    return f".accel-train-index-{kind}.safetensors"


def indexed(
    root: Path,
    kind: str,
    look: Callable[[], Index],
    places: Callable[[], Sequence[str]] | None = None,
) -> Index:
    """Return the index of the data in `root`: the kept one, or if the data has changed the one that `look` makes.

    `kind`: the data's layout, part of the file's name. `places`: finds what is there now; None: the state of a folder
    says whether a folder was added to it. An index that cannot be written is no error. Raises what `look` raises.
    """
    files = index_places(root, kind)
    if (kept := _find(files, root, places)) is not None:
        return kept
    with _lock(files[1].with_suffix(".lock")):
        # Another process may have made it while this one waited.
        return _find(files, root, places) or _make(root, files, look)


def _make(root: Path, files: Sequence[Path], look: Callable[[], Index]) -> Index:
    """Look through the data, and write its index if it can be kept."""
    began, names = time.time(), _names(root)
    patience = threading.Timer(
        SLOW_SECONDS, LOGGER.info, [f"Looking through {root}, which may take minutes; the next start need not do it."]
    )
    patience.daemon = True
    patience.start()
    try:
        index = look()
    finally:
        patience.cancel()
    if index.missing:
        return index
    with contextlib.suppress(OSError):  # what was looked at is not there any more
        # Their states come first: what changes after them is seen by the next start, what changed before them now.
        states = {place: _state(root, place) for place in index.places}
        if names is not None and names == _names(root) and _settled(root, index.places, began):
            write_index(files, root, index, states)
    return index


def _find(files: Sequence[Path], root: Path, places: Callable[[], Sequence[str]] | None) -> Index | None:
    """The index that is that of the data as it is now, if there is one."""
    for file in files:
        if (kept := read_index(file, root)) is not None:
            with contextlib.suppress(OSError):  # of data that is not there any more
                same = places is None or sorted(places()) == sorted(kept.states)
                if same and all(_state(root, place) == state for place, state in kept.states.items()):
                    return kept
    return None


def splits_of_index(data: Data, index: Index, source_of: Callable[[SplitFiles], Source]) -> Splits:
    """The splits of an index, of which `source_of` has the images."""
    sources = {split: source_of(files) for split, files in index.splits.items()}
    said = {"ignored": index.ignored, "mistake": index.mistake}
    listed = {"table": index.table, "missing": index.missing}
    return splits_of_files(data, index.classes, sources, **said, **listed)


@contextlib.contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Let the first process in, and the others when it is done: then its index is there, or cannot be written, and all
    of them do its work at the same time. So they do where files cannot be locked."""
    from filelock import FileLock, Timeout

    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, NotImplementedError, Timeout):
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(file)
            try:
                held.enter_context(lock.acquire(timeout=0))
            except Timeout:
                with lock.acquire(timeout=LOCK_SECONDS):
                    pass
        yield


def _state(root: Path, place: str) -> str:
    """A text that changes when the place does: a file's size and time, a folder's time. Raises OSError.

    Of the root the names in it, because the index itself is written there and changes its time.
    """
    path = root / place if place else root
    status = path.stat()
    if path.is_dir():
        if place:
            return str(status.st_mtime_ns)
        names = sorted(name for name in os.listdir(os.fsencode(path)) if not name.startswith(b"."))  # noqa: PTH208 -- bytes
        return hashlib.sha256(b"\0".join(names)).hexdigest()
    return f"{status.st_size} {status.st_mtime_ns}"


def _names(root: Path) -> str | None:
    with contextlib.suppress(OSError):  # it can be entered, but not listed
        return _state(root, "")
    return None


def _settled(root: Path, places: Sequence[str], began: float) -> bool:
    """Whether all places were left alone since some time before `began`, when the look began."""
    newest = max(((root / place).stat().st_mtime for place in places if place or root.is_file()), default=0.0)
    return newest < began - SETTLED_SECONDS


class StringArray:
    """Many strings in two tensors, which a process shares with its data workers: a list of a million strings would be
    copied into each."""

    def __init__(self, names: Sequence[str]) -> None:
        encoded = [name.encode(errors="surrogateescape") for name in names]
        self.text = torch.from_numpy(np.frombuffer(bytearray(b"".join(encoded)), dtype=np.uint8))
        """uint8: all strings, one after the other."""
        self.ends = torch.tensor([len(name) for name in encoded], dtype=torch.int64).cumsum(0)
        """int64 [n]: where each string ends in `text`."""
        self._arrays: tuple[Any, Any] | None = None  # the same for NumPy, which finds an item three times as fast

    def __getstate__(self) -> dict[str, Any]:
        self._arrays = None  # pickling moves the tensors to shared memory, and such a view would stay behind
        return self.__dict__

    @classmethod
    def of(cls, text: torch.Tensor, ends: torch.Tensor) -> StringArray:
        """The strings in `text`, each of which ends where `ends` says."""
        strings = cls([])
        strings.text, strings.ends = text, ends
        return strings

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, id: int) -> str:
        if self._arrays is None:
            self._arrays = self.text.numpy(), self.ends.numpy()
        text, ends = self._arrays
        start = ends[id - 1] if id else 0
        return text[start : ends[id]].tobytes().decode(errors="surrogateescape")


# The index of a data set of files, and the safetensors file that keeps it: complete or absent.


VERSION = 5
"""To be raised when an `Index` of the same files changes: other images are found, or other classes."""


@dataclass(frozen=True)
class SplitFiles:
    """The images of one split."""

    names: StringArray
    """Relative to the data's root, or to the tar file."""
    labels: torch.Tensor
    """int64 [n], or bool [n, classes]."""
    positions: torch.Tensor | None = None
    """int64 [n, 3] of images in tar files: the tar file's number, the offset and the size in bytes."""


@dataclass(frozen=True)
class Index:
    """What depends on the files alone, and on no option but data.name and data.root."""

    places: tuple[str, ...]
    """The tar files, tables or folders that were looked through, relative to the root; "": the root itself."""
    classes: tuple[str, ...]
    splits: Mapping[str, SplitFiles]
    tars: tuple[str, ...] = ()
    """The tar files of `SplitFiles.positions`."""
    table: str = ""
    missing: tuple[str, ...] = ()
    ignored: str = ""
    mistake: str = ""
    """The last four as in `Splits`."""
    states: Mapping[str, str] = field(default_factory=dict)
    """Of each place, when the index was made: what its file says."""

    def __len__(self) -> int:
        return sum(len(files.labels) for files in self.splits.values())


def read_index(file: Path, root: Path) -> Index | None:
    """The index of the data in `root` that `file` has; None if it is absent, damaged or of another version."""
    try:
        header, tensors = _tensors(file)
        about = parse_json(header["index"])
        if about["version"] != VERSION or _checksum(header["index"], tensors) != header["checksum"]:
            return None
        splits = {split: _split(tensors, split) for split in about["splits"]}
        _check(about, splits)
        return Index(
            places=tuple(about["states"]),
            classes=tuple(about["classes"]),
            splits=splits,
            tars=tuple(about["tars"]),
            table=about["table"],
            ignored=about["ignored"],
            # It names the folder, which may have been copied together with its index.
            mistake=about["mistake"].replace(about["root"], str(root)),
            states=about["states"],
        )
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    except MemoryError:
        return None


def _tensors(file: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """The metadata and the tensors of a safetensors file, which may be damaged."""
    from safetensors.torch import load

    content = read_regular_file(file, LARGEST, follow=True)
    header = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header["__metadata__"], load(content)


def _checksum(about: str, tensors: Mapping[str, torch.Tensor]) -> str:
    total = zlib.crc32(about.encode())
    for name in sorted(tensors):
        array = tensors[name].numpy()
        total = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), total)
        total = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, total)
    return str(total)


def _check(about: Mapping[str, Any], splits: Mapping[str, SplitFiles]) -> None:
    """Raise ValueError unless the parts of an index, which may be somebody else's, are of their kinds and fit."""
    lists = [about[name] for name in ("classes", "tars", "splits")]
    words = [about[name] for name in ("root", "table", "ignored", "mistake")]
    for values in lists:
        words += values if isinstance(values, list) else [None]
    states = about["states"]
    words += [*states.values()] if isinstance(states, dict) else [None]
    if not all(isinstance(word, str) for word in words) or "train" not in splits:
        raise ValueError("its description is of another kind")
    for files in splits.values():
        labels, positions, count = files.labels, files.positions, len(files.labels)
        fits = labels.dtype == torch.int64 and labels.shape == (count,) and _is_within(labels, len(about["classes"]))
        fits |= labels.dtype == torch.bool and labels.shape == (count, len(about["classes"]))
        fits &= files.names.text.dtype == torch.uint8 and files.names.ends.shape == (count,)
        fits &= files.names.ends.dtype == torch.int64 and _is_within(files.names.ends, files.names.text.numel() + 1)
        if positions is not None:
            fits &= positions.dtype == torch.int64 and positions.shape == (count, 3)
            fits &= bool(fits) and _is_within(positions[:, 0], len(about["tars"]))
        if not fits:
            raise ValueError("its arrays do not fit to each other")


def _is_within(values: torch.Tensor, most: int) -> bool:
    return not values.numel() or bool(values.min() >= 0 and values.max() < most)


def _split(tensors: Mapping[str, torch.Tensor], split: str) -> SplitFiles:
    names = StringArray.of(tensors[f"{split}.text"], tensors[f"{split}.ends"])
    return SplitFiles(names, tensors[f"{split}.labels"], tensors.get(f"{split}.positions"))


def write_index(files: Sequence[Path], root: Path, index: Index, states: Mapping[str, str]) -> None:
    """Write the index into the first of `files` that can be written: all of it, or nothing."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for split, files_of_split in index.splits.items():
        names = files_of_split.names
        tensors |= {f"{split}.text": names.text, f"{split}.ends": names.ends, f"{split}.labels": files_of_split.labels}
        if files_of_split.positions is not None:
            tensors[f"{split}.positions"] = files_of_split.positions
    about = {
        "version": VERSION,
        "root": str(root),
        "states": states,
        "classes": index.classes,
        "splits": [*index.splits],
        "tars": index.tars,
        "table": index.table,
        "ignored": index.ignored,
        "mistake": index.mistake,
    }
    text = json.dumps(about)
    checksum = _checksum(text, tensors)
    for file in files:
        with contextlib.suppress(OSError, SafetensorError):  # a read-only folder, or a full disk
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_replacement(file) as temporary:
                save_file(tensors, temporary, metadata={"index": text, "checksum": checksum})
                set_default_permissions(temporary)
                fsync(temporary)
            return
