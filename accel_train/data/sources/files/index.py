"""The index of a data set of files: what a look through it found, kept so that the next start need not look again.

Reading the headers of a tar file with a million images takes a minute, and listing a million files on a network file
system longer. The index is one safetensors file, hidden beside the data. It is complete or absent, made by one process
while the others wait, and used as long as the data has not changed.
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from accel_train.config.schema import Data
from accel_train.data.sources.files.encoded import StringArray
from accel_train.data.sources.splits import Source, Splits, splits_of_files
from accel_train.errors import LOGGER
from accel_train.files import atomic_replacement, set_default_permissions

VERSION = 1
"""To be raised when an `Index` of the same files changes: other images are found, or other classes."""
SETTLED_SECONDS = 2.0
"""A file system's clock may tick once in two seconds. What has changed since then may change again unnoticed."""
LOCK_SECONDS = 3600.0
"""How long a process waits for another one's index before it looks through the data itself."""
SLOW_SECONDS = 5.0
"""After this time the user is told what takes so long."""


@dataclass(frozen=True)
class SplitFiles:
    """The images of one split."""

    names: StringArray
    """Relative to the data's root, or to the tar file."""
    labels: torch.Tensor
    """int64 [n]."""
    positions: npt.NDArray[np.int64] | None = None
    """int64 [n, 3] of images in tar files: the tar file's number, the offset and the size in bytes."""


@dataclass(frozen=True)
class Index:
    """What depends on the files alone, and on no option but data.name and data.root."""

    places: tuple[str, ...]
    """The tar files or folders that were looked through, relative to the root; "": the root itself."""
    classes: tuple[str, ...]
    splits: Mapping[str, SplitFiles]
    semantics: int
    tars: tuple[str, ...] = ()
    """The tar files of `SplitFiles.positions`."""
    ignored: str = ""
    notes: tuple[str, ...] = ()
    mistake: str = ""
    """The last three as in `Splits`."""


def indexed(
    root: Path, kind: str, look: Callable[[], Index], places: Callable[[], Sequence[str]] | None = None
) -> Index:
    """Return the index of the data in `root`: the kept one, or if the data has changed the one that `look` makes.

    `kind`: the data's layout, part of the file's name. `places`: finds what is there now; None: the state of a folder
    says whether a folder was added to it. An index that cannot be written is no error. Raises what `look` raises.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "accel_train" / "indexes"
    name = f"accel-train-index-{kind}.safetensors"
    beside = root / f".{name}" if root.is_dir() else root.with_name(f".{root.name}.{name}")
    apart = caches / f"{hashlib.sha256(os.fsencode(root.absolute())).hexdigest()[:32]}-{name}"
    files = beside, apart  # apart if the data's folder is read-only
    if (kept := _read(files, root, places)) is not None:
        return kept
    with _lock(apart.with_suffix(".lock")):
        if (kept := _read(files, root, places)) is not None:  # another process made it while this one waited
            return kept
        began, names = time.time(), _state(root, "")
        slow = threading.Timer(SLOW_SECONDS, LOGGER.info, [f"Looking through {root}; the next start need not do it."])
        slow.daemon = True
        slow.start()
        try:
            index = look()
        finally:
            slow.cancel()
        with contextlib.suppress(OSError):  # what was looked at is not there any more
            # Their states come first: what changes after them is seen by the next start, what changed before them now.
            states = {place: _state(root, place) for place in index.places}
            if names == _state(root, "") and _settled(root, index.places, began):
                _write(files, root, index, states)
        return index


def splits_of_index(data: Data, index: Index, sources: Mapping[str, Source]) -> Splits:
    """The splits of an index, from the images of each."""
    said = {"ignored": index.ignored, "notes": index.notes, "mistake": index.mistake, "semantics": index.semantics}
    return splits_of_files(data, index.classes, sources, **said)


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
    """A text that changes when the place does: a tar file's size and time, a folder's time. Raises OSError.

    Of the root the names in it, because the index itself is written there and changes its time.
    """
    path = root / place if place else root
    status = path.stat()
    if path.is_dir():
        if place:
            return str(status.st_mtime_ns)
        names = sorted(os.fsencode(entry.name) for entry in os.scandir(path) if not entry.name.startswith("."))
        return hashlib.sha256(b"\0".join(names)).hexdigest()
    return f"{status.st_size} {status.st_mtime_ns}"


def _settled(root: Path, places: Sequence[str], began: float) -> bool:
    """Whether all places were left alone since some time before `began`, when the look began."""
    newest = max(((root / place).stat().st_mtime for place in places if place or root.is_file()), default=0.0)
    return newest < began - SETTLED_SECONDS


def _read(files: Sequence[Path], root: Path, places: Callable[[], Sequence[str]] | None) -> Index | None:
    """The kept index, if it is that of the data as it is now and nothing in it is damaged."""
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, framework="pt") as stored:
                metadata = stored.metadata() or {}
                about = json.loads(metadata["index"])
                if about["version"] != VERSION or (places is not None and sorted(places()) != sorted(about["states"])):
                    continue
                if any(_state(root, place) != state for place, state in about["states"].items()):
                    continue
                # Copies: if another machine replaced a file that is mapped from a network file system, to read it
                # would end this process.
                arrays = {name: stored.get_tensor(name).clone() for name in sorted(stored.keys())}
            if _checksum(metadata["index"], arrays) != metadata["checksum"]:
                continue
            return Index(
                places=tuple(about["states"]),
                classes=tuple(about["classes"]),
                splits={split: _split(arrays, split) for split in about["splits"]},
                semantics=about["semantics"],
                tars=tuple(about["tars"]),
                ignored=about["ignored"],
                # They name the folder, which may have been copied together with its index.
                notes=tuple(note.replace(about["root"], str(root)) for note in about["notes"]),
                mistake=about["mistake"].replace(about["root"], str(root)),
            )
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # absent, damaged, or of data that is not there any more
    return None


def _checksum(about: str, arrays: Mapping[str, torch.Tensor]) -> str:
    total = zlib.crc32(about.encode())
    for name in sorted(arrays):
        total = zlib.crc32(arrays[name].numpy().tobytes(), zlib.crc32(name.encode(), total))
    return str(total)


def _split(arrays: Mapping[str, torch.Tensor], split: str) -> SplitFiles:
    names = StringArray.of(arrays[f"{split}.text"].numpy(), arrays[f"{split}.ends"].numpy())
    positions = arrays.get(f"{split}.positions")
    return SplitFiles(names, arrays[f"{split}.labels"], None if positions is None else positions.numpy())


def _write(files: Sequence[Path], root: Path, index: Index, states: Mapping[str, str]) -> None:
    """Write the index into the first of `files` that can be written: all of it, or nothing."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = dict(_tensors(index))
    about = {
        "version": VERSION,
        "root": str(root),
        "states": states,
        "classes": index.classes,
        "splits": [*index.splits],
        "semantics": index.semantics,
        "tars": index.tars,
        "ignored": index.ignored,
        "notes": index.notes,
        "mistake": index.mistake,
    }
    text = json.dumps(about)
    metadata = {"index": text, "checksum": _checksum(text, tensors)}
    for file in files:
        # A read-only folder, or a full disk; safetensors has its own error for it.
        with contextlib.suppress(OSError, SafetensorError), atomic_replacement(file) as temporary:
            save_file(tensors, temporary, metadata=metadata)
            set_default_permissions(temporary)
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            return


def _tensors(index: Index) -> Iterator[tuple[str, torch.Tensor]]:
    for split, files in index.splits.items():
        yield f"{split}.text", torch.from_numpy(files.names.text)
        yield f"{split}.ends", torch.from_numpy(files.names.ends)
        yield f"{split}.labels", files.labels
        if files.positions is not None:
            yield f"{split}.positions", torch.from_numpy(files.positions)
