"""A folder mounted a second time, read-only, as slow as a network file system: by FUSE, with the kernel's read-ahead.

    with SlowMount(folder, place, latency=0.005, bandwidth=50e6) as mount:
        train(place)
        mount.counts()

Each look-up, open and read that reaches the file system waits `latency` seconds, and all reads share a line of
`bandwidth` bytes a second. What the kernel has in its page cache does not wait, and it reads 128 kB ahead, which is
Linux's default.
It needs /dev/fuse, the right to mount, Debian's `fuse3` and the package mfusepy.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import errno
import importlib
import importlib.util
import mmap
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

COUNTS = struct.Struct("qq")  # reads that reached the file system, and their bytes


def missing() -> str:
    """Why no such folder can be mounted here; "" if it can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse"
    if shutil.which("fusermount3") is None or ctypes.util.find_library("fuse3") is None:
        return "FUSE is not installed (Debian's fuse3)"
    if importlib.util.find_spec("mfusepy") is None:
        return "mfusepy is not installed"
    return ""


class SlowMount:
    """The mount, in a process of its own; it ends with the block."""

    def __init__(self, folder: Path, place: Path, *, latency: float = 0.0, bandwidth: float = float("inf")) -> None:
        """`place`: an empty folder."""
        self.folder, self.place, self.latency, self.bandwidth = folder, place, latency, bandwidth
        self.state = place.with_name(f"{place.name}.counts")

    def __enter__(self) -> SlowMount:
        self.state.write_bytes(COUNTS.pack(0, 0))
        words = [self.folder, self.place, self.state, self.latency, self.bandwidth]
        self._process = subprocess.Popen([sys.executable, __file__, *map(str, words)])
        deadline = time.monotonic() + 30
        while not self.place.is_mount():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._end()
                raise RuntimeError(f"{self.place} could not be mounted; see above")
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        subprocess.run(["fusermount3", "-u", "-q", "-z", str(self.place)], check=False)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()

    def counts(self) -> tuple[int, int]:
        """Reads that have reached the file system, and their bytes."""
        reads, size = COUNTS.unpack(self.state.read_bytes())
        return reads, size


class Slow:
    """What the kernel asks of the file system. Its threads call it at the same time."""

    def __init__(self, folder: Path, state: Path, latency: float, bandwidth: float) -> None:
        self.folder, self.latency, self.bandwidth = folder, latency, bandwidth
        with state.open("r+b") as file:
            self._counts = mmap.mmap(file.fileno(), COUNTS.size)
        self._lock, self._free_at = threading.Lock(), 0.0

    def _wait(self, size: int = 0) -> None:
        with self._lock:
            now = time.monotonic()
            if size:
                reads, total = COUNTS.unpack(self._counts[:])
                self._counts[:] = COUNTS.pack(reads + 1, total + size)
                self._free_at = max(now, self._free_at) + size / self.bandwidth
            until = max(now, self._free_at) if size else now
        time.sleep(self.latency + until - now)

    def getattr(self, path: str, handle: int | None = None) -> dict[str, Any]:
        self._wait()
        status = Path(f"{self.folder}{path}").stat()
        found = {name: getattr(status, name) for name in ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size")}
        times = ("st_atime", "st_mtime", "st_ctime")
        return found | {name: getattr(status, f"{name}_ns") for name in times}

    def readdir(self, path: str, handle: int) -> list[str]:
        self._wait()
        return [".", "..", *os.listdir(f"{self.folder}{path}")]  # noqa: PTH208 -- FUSE's paths are texts

    def open(self, path: str, flags: int) -> int:
        self._wait()
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, "read-only")
        return os.open(f"{self.folder}{path}", os.O_RDONLY)

    def read(self, path: str, size: int, offset: int, handle: int) -> bytes:
        content = os.pread(handle, size, offset)
        self._wait(len(content))
        return content

    def release(self, path: str, handle: int) -> int:
        os.close(handle)
        return 0


def serve(folder: Path, place: Path, state: Path, latency: float, bandwidth: float) -> None:
    """Until it is unmounted."""
    fuse: Any = importlib.import_module("mfusepy")
    slow = Slow(folder, state, latency, bandwidth)
    names = ("getattr", "readdir", "open", "read", "release")
    methods = {name: staticmethod(getattr(slow, name)) for name in names}
    operations = type("Operations", (fuse.Operations,), {"use_ns": True, **methods})
    # auto_cache: as NFS does, keep what was read until the file has another size or time.
    options = {"auto_cache": True, "attr_timeout": 3.0, "entry_timeout": 3.0, "max_idle_threads": 16}
    fuse.FUSE(operations(), str(place), foreground=True, ro=True, fsname="slow", **options)


if __name__ == "__main__":
    folder, place, state, *numbers = sys.argv[1:]
    serve(Path(folder), Path(place), Path(state), *map(float, numbers))
