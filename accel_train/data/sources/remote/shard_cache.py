"""The copies of shards on this node: complete or absent, made once however many processes ask, kept for the next start.

The processes share nothing but the folder. A lock on a file for each shard lets one of them copy it while those that
need it wait. A lock on the folder's room lets one of them count and remove at a time. The order in which copies are
removed is that of their times of change: a new copy has the time of now, and ahead.py, which knows the future, gives
the copies that are needed later an earlier time. So any process can make room, and does not need the others.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from accel_train.config.declaration import bytes_of
from accel_train.config.schema import Data
from accel_train.config.url import is_url
from accel_train.data.sources.remote.storage import Shard, Storage
from accel_train.errors import UserError
from accel_train.files import fsync

FETCHES = 8
"""Shards that are fetched at a time."""
SPARE = 1 << 30
"""Bytes of the disk that are left to others, where --data.cache-size does not say how many are ours."""


def cache_folder(data: Data) -> Path:
    """The folder of this data in the node's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "accel_train" / "shards"
    url = str(data.root if is_url(data.root) else data.root.absolute())
    readable = re.sub(r"[^\w.-]+", "-", url.rpartition("://")[2]).lstrip("-")[-60:]
    return (data.cache_dir or default.expanduser()) / f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Copy:
    """A shard, or a part of one, in the cache."""

    path: Path
    size: int
    time: float
    """Of its last change: those with the earliest are removed first."""
    complete: bool


class ShardCache:
    """The copies of the shards of one data.root. It can be passed to workers."""

    def __init__(self, data: Data, storage: Storage) -> None:
        """Raises UserError if the folder cannot be made."""
        self.storage, self.folder = storage, cache_folder(data)
        self.limit = None if data.cache_size is None else bytes_of(data.cache_size)
        """Bytes that all copies take together; None: as many as the disk has room for."""
        self.shards: dict[str, Shard] = {}
        """By their names."""
        self.began = time.time()
        self.ahead: Any = None
        """The `FetchAhead` of this process, if it has one."""
        self.ask_to_stop: Callable[[str], None] | None = None
        """Called with the reason if a shard that will be needed cannot be fetched, so that the run is saved before."""
        try:
            (self.folder / "locks").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--data.cache-dir: {self.folder} cannot be made ({error.strerror}); name a folder on a disk of this "
                "node."
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "ahead": None, "ask_to_stop": None}

    def path(self, name: str) -> Path:
        """Where the copy of this shard is, or would be: another content has another name."""
        shard = self.shards[name]
        key = hashlib.sha256(f"{shard.name}\n{shard.state}".encode(errors="surrogateescape")).hexdigest()[:16]
        return self.folder / f"{key}-{name.rpartition('/')[2] or 'shard.tar'}"

    @property
    def beside(self) -> int:
        """Bytes that are needed beside a copy while it is made, at most."""
        return 0

    def size_of(self, name: str) -> int | None:
        """Bytes of a shard's copy; None: they are known when it is made."""
        return self.shards[name].size

    def has(self, name: str) -> bool:
        with contextlib.suppress(OSError):
            return self._is_whole(name, self.path(name).stat().st_size)
        return False

    def _is_whole(self, name: str, size: int) -> bool:
        return size == (self.size_of(name) or size)

    def open(self, name: str) -> IO[bytes]:
        """The copy of a shard, which stays readable when it is removed. It is fetched first if it is absent. Raises
        UserError if it cannot be fetched."""
        while True:
            with contextlib.suppress(FileNotFoundError):  # also if it is removed between the two
                file = self.path(name).open("rb", buffering=0)
                if self._is_whole(name, os.fstat(file.fileno()).st_size):
                    return file
                file.close()  # cut by somebody else, or by a power failure
                self.path(name).unlink(missing_ok=True)
            self.fetch(name)

    def fetch(self, name: str, worth: float | None = None, *, removes: bool = True) -> bool:
        """Copy the shard, unless it is there; wait if another process copies it. Return whether it is there now.

        `worth`: its place in the order of removal, as a time; only copies with an earlier one make room for it, or none
        if not `removes`. None: it is needed now, and gets room in any case. Raises UserError.
        """
        shard, path = self.shards[name], self.path(name)
        with self.locked(path.name):
            if self.has(name):
                return True
            part = path.with_name(f".{path.name}.part")
            try:
                if not self.write(shard, part, worth if removes else -math.inf):
                    return False
                fsync(part)
                os.utime(part, (time.time(), time.time() if worth is None else worth))
                part.replace(path)
            except OSError as error:
                advice = "give less --data.cache-size, or another --data.cache-dir" * (error.errno == errno.ENOSPC)
                raise UserError(
                    f"--data.cache-dir: {self.folder} cannot be written ({error.strerror or error}); "
                    f"{advice or 'name a folder on a disk of this node'}.",
                    every_process=False,
                ) from error
            finally:
                part.unlink(missing_ok=True)
        return True

    def set_worth(self, name: str, worth: float) -> None:
        """Change the copy's place in the order of removal."""
        with contextlib.suppress(OSError):
            os.utime(self.path(name), (time.time(), worth))

    def write(self, shard: Shard, part: Path, worth: float | None) -> bool:
        """Write the copy into a new file `part`; False: there is no room. `worth` as in `fetch`. Raises OSError and
        UserError."""
        if not self.reserve(shard, {part: shard.size}, worth):
            return False
        self.storage.download(shard, part)
        return True

    def reserve(self, shard: Shard, files: Mapping[Path, int], worth: float | None) -> bool:
        """Make room for files of these sizes, in bytes, and take it; they may be there already and become larger.
        Raises OSError and UserError."""
        with self.locked("room"):
            copies, wanted = [copy for copy in self.copies() if copy.path not in files], sum(files.values())
            total = sum(copy.size for copy in copies)
            limit = self.capacity(total)
            if self.limit is not None and wanted > self.limit:
                raise UserError(f"--data.cache-size: {self.storage.url(shard.name)} alone has {wanted:,} bytes.")
            for copy in sorted(copies, key=lambda copy: (copy.complete, copy.time)):
                if total + wanted <= limit:
                    break
                if not copy.complete and not self._is_left(copy.path):
                    continue
                if copy.complete and worth is not None and copy.time >= worth:
                    return False
                copy.path.unlink(missing_ok=True)
                total -= copy.size
            if total + wanted > limit and worth is not None:
                return False
            for path, size in files.items():
                with path.open("ab") as file:
                    file.truncate(size)
        return True

    def capacity(self, total: int | None = None) -> int:
        """Bytes that all copies may take together. `total`: those that they take, if that is known."""
        if self.limit is not None:
            return self.limit
        total = sum(copy.size for copy in self.copies()) if total is None else total
        return total + max(0, shutil.disk_usage(self.folder).free - SPARE)

    def names(self) -> set[str]:
        """The names of all files in the folder."""
        return set(os.listdir(self.folder))  # noqa: PTH208 -- a path for each would take longer

    def copies(self) -> list[Copy]:
        """What is in the folder now: of these shards, and of what they were before."""
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.name.endswith((".tar", ".part")):
                        status = entry.stat()
                        complete = not entry.name.endswith(".part")
                        found.append(Copy(Path(entry.path), status.st_size, status.st_mtime, complete))
        return found

    def _is_left(self, part: Path) -> bool:
        """Whether the process that wrote this part of a shard was killed: then nobody holds the shard's lock."""
        from filelock import Timeout

        try:
            with self.locked(part.name.removeprefix(".").removesuffix(".part").removesuffix(".download"), wait=False):
                return True
        except Timeout:
            return False

    @contextlib.contextmanager
    def locked(self, name: str, *, wait: bool = True) -> Iterator[None]:
        """Let one process of this node in at a time. Raises UserError; Timeout unless `wait`."""
        from filelock import FileLock

        lock: Any = FileLock(self.folder / "locks" / f"{name}.lock")
        try:
            held = lock.acquire(timeout=-1 if wait else 0)
        except (OSError, NotImplementedError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise UserError(
                f"--data.cache-dir: files in {self.folder} cannot be locked ({error}); name a folder on a disk "
                "of this node."
            ) from error
        with held:
            yield


def size_text(count: float) -> str:
    """ "12.3 GB", in decimal units as --data.cache-size has them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
