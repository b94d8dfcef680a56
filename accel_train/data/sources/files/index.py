"""When the index of a data set is used, and when it is made: what a look through its files found, for the next start.

Reading the headers of a tar file with a million images takes a minute, and listing a million files on a network file
system longer. The index is one file, hidden beside the data (index_file.py). It is complete or absent, made by one
process while the others wait, and used as long as the data has not changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from accel_train.config.schema import Data
from accel_train.data.sources.files.index_file import Index, SplitFiles, read_index, write_index
from accel_train.data.sources.splits import Source, Splits, splits_of_files
from accel_train.errors import LOGGER

SETTLED_SECONDS = 2.0
"""A file system's clock may tick once in two seconds. What has changed since then may change again unnoticed."""
CHANGING = "its data has just changed, and may still be changing"
LOCK_SECONDS = 3600.0
"""How long a process waits for another one's index before it looks through the data itself."""
SLOW_SECONDS = 5.0
"""After this time the user is told what takes so long."""
AGAIN_SECONDS = 30.0
"""And each time after this one, how far it is."""


class Progress:
    """Says what takes so long, while a look through the data lasts."""

    def __init__(self, root: Path) -> None:
        self.root, self.images = root, 0
        self._over = threading.Event()

    def __enter__(self) -> Progress:
        threading.Thread(target=self._tell, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def _tell(self) -> None:
        began, wait = time.monotonic(), SLOW_SECONDS
        while not self._over.wait(wait):
            found = f": {self.images:,} images in {time.monotonic() - began:.0f} s" if self.images else ""
            LOGGER.info(f"Looking through {self.root}{found}; the next start need not do it.")
            wait = AGAIN_SECONDS


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
    look: Callable[[Progress], Index],
    places: Callable[[], Sequence[str]] | None = None,
    *,
    verify: bool = False,
) -> Index:
    """Return the index of the data in `root`: the kept one, or if the data has changed the one that `look` makes.

    `kind`: the data's layout, part of the file's name. `places`: finds what is there now; None: the state of a folder
    says whether a folder was added to it. `verify`: look in any case, and say what differs from the kept index. An
    index that cannot be written is no error. Raises what `look` raises.
    """
    files = index_places(root, kind)
    before = [*map(_version, files)]
    if not verify:
        kept, is_current = _find(files, root, places)
        if kept is not None and is_current:
            return kept
    with _lock(files[1].with_suffix(".lock")):
        kept, is_current = _find(files, root, places)
        # Another process made it while this one waited. To verify, each one looks that finds the file unchanged.
        if kept is not None and is_current and not (verify and [*map(_version, files)] == before):
            return kept
        index = _make(root, files, look)
    if kept is not None:
        _tell_changes(root, kept, index, verified=verify)
    return index


def _make(root: Path, files: Sequence[Path], look: Callable[[Progress], Index]) -> Index:
    """Look through the data, and write its index if it can be kept."""
    began, names = time.time(), _names(root)
    with Progress(root) as progress:
        index = look(progress)
    if index.missing:
        return replace(index, unkept="files are missing")
    with contextlib.suppress(OSError):  # what was looked at is not there any more
        # Their states come first: what changes after them is seen by the next start, what changed before them now.
        states = {place: _state(root, place) for place in index.places}
        if names is not None and names == _names(root) and _settled(root, index.places, began):
            return write_index(files, root, index, states)
    return replace(index, unkept=CHANGING)


def _find(files: Sequence[Path], root: Path, places: Callable[[], Sequence[str]] | None) -> tuple[Index | None, bool]:
    """The newest index that is that of the data as it is now, and True; or else of any earlier state, and False."""
    stale = None
    for file in sorted(files, key=_version, reverse=True):
        if (kept := read_index(file, root)) is not None:
            with contextlib.suppress(OSError):  # of data that is not there any more
                known = sorted(kept.states)
                same = places is None or sorted(places()) == known
                if same and all(_state(root, place) == state for place, state in kept.states.items()):
                    return kept, True
            stale = kept if stale is None else stale
    return stale, False


def _version(file: Path) -> tuple[int, int]:
    """Differs for each index that is written into the file; larger for later ones."""
    try:
        status = file.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_ino


def _tell_changes(root: Path, before: Index, now: Index, *, verified: bool) -> None:
    """Say how the data differs from an earlier index of it."""
    difference = _difference(before, now)
    if difference:
        where = f"There is a new index: {now.file}" if now.file else f"There is no new index: {now.unkept}"
        LOGGER.info(f"{root} has changed since it was indexed: {difference}. {where}.")
    elif verified:
        LOGGER.info(f"{root}: all {len(now):,} images are as their index says.")


def _difference(before: Index, now: Index) -> str:
    """The first kind of difference between two indexes of the same data, in words; "": none that a training sees."""
    if len(before) != len(now):
        return f"{len(before):,} images then, {len(now):,} now"
    if before.classes != now.classes or before.splits.keys() != now.splits.keys():
        return "other classes or splits"
    for split, files in now.splits.items():
        old = before.splits[split]
        if not (np.array_equal(old.names.text, files.names.text) and np.array_equal(old.names.ends, files.names.ends)):
            return "other images"
        if not torch.equal(old.labels, files.labels):
            return "other labels"
        if files.positions and old.positions and not np.array_equal(old.positions.array, files.positions.array):
            return "other places in the tar files"
        if files.stats and old.stats:
            changed = np.flatnonzero((old.stats.array != files.stats.array).any(1))
            if len(changed):
                return f"{len(changed):,} image files have another size or time, such as {files.names[changed[0]]}"
    if (before.weights is None) != (now.weights is None):
        return "other weights"
    if before.weights is not None and now.weights is not None and not torch.equal(before.weights, now.weights):
        return "other weights"
    return ""


def splits_of_index(data: Data, index: Index, source_of: Callable[[SplitFiles], Source]) -> Splits:
    """The splits of an index, of which `source_of` has the images."""
    sources = {split: source_of(files) for split, files in index.splits.items()}
    said = {"ignored": index.ignored, "notes": index.notes, "mistake": index.mistake}
    listed = {"train_weights": index.weights, "table": index.table, "missing": index.missing}
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
