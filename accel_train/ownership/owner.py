"""The file owner.json in a run's directory names the start that owns the run.

File locks are not reliable where runs are stored: NFS may be mounted without them, and on some parallel file systems
they only work within one host. So only two operations are used here: a hard link, which the file server creates
atomically and for one host only, and a rename.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import time
import uuid
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from accel_train.files import open_to_write
from accel_train.launch.parent import elastic_id
from accel_train.launch.process import has_ended, hostname, job_id, machine_id, start_time
from accel_train.untrusted import open_regular_file, read_regular_file

FILE = "owner.json"
MOST_BYTES = 10_000  # of owner.json
STALE_SECONDS = 120.0  # without a sign of life: dead. Long enough for a process that holds Python's lock
# What file systems without hard links answer (vfat, FUSE, some NFS). If the folder cannot be written at all, the other
# way says so.
NO_LINKS = (
    errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EACCES, errno.EMLINK, errno.EINVAL
)  # fmt: skip


@dataclass(frozen=True)
class Owner:
    """One start of a run, as owner.json names it."""

    token: str
    host: str
    machine: str
    pid: int
    started: str
    """When the process began, see `process.start_time`."""
    job: str
    """The job's number in the batch system, else the id of agents of torchrun that restart their processes, or ""."""
    since: float
    """When it became the owner, by its host's clock. Only for messages."""

    @classmethod
    def of_this_process(cls) -> Owner:
        token, pid = uuid.uuid4().hex, os.getpid()
        job = job_id() or elastic_id()
        return cls(token, hostname(), machine_id(), pid, start_time(pid), job, round(time.time(), 3))

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        since = datetime.fromtimestamp(self.since).isoformat(" ", "seconds")
        return f"process {self.pid} on {self.host}{job}, since {since}"


@dataclass(frozen=True)
class OwnerFile:
    """The state of owner.json at one moment."""

    owner: Owner | None
    """None if this program did not write the file, or is still writing it."""
    inode: int
    changed: int
    """Modification time in nanoseconds, by the file server's clock."""

    @property
    def who(self) -> str:
        """The owner, for messages."""
        return f"a start that {FILE} does not name" if self.owner is None else str(self.owner)

    def lives(self) -> bool | None:
        """Whether the owner's process is alive; None if it is on another machine, or not named."""
        if self.owner is None or self.owner.machine != machine_id():
            return None
        return not has_ended(self.owner.pid, self.owner.started)

    def seems_alive(self) -> bool:
        """Whether the owner is alive. On another machine: by the time of its file and this machine's clock, which is
        good enough to tell a user, and not to take a run over."""
        lives = self.lives()
        return time.time() - self.changed / 1e9 < STALE_SECONDS if lives is None else lives


def write_private(directory: Path, owner: Owner) -> Path:
    """Write the contents of owner.json under a name that only this start uses; return the path. Raises OSError."""
    path = directory / f".owner-{owner.token}.tmp"
    try:
        with open_to_write(path, "wb") as file:
            file.write(f"{json.dumps(dataclasses.asdict(owner), indent=2)}\n".encode())
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()  # a part of it, if the disk is full
        raise
    return path


def publish_owner(private: Path, place: Path) -> bool:
    """Give the file `private` the name `place`, atomically. Returns False if that name is taken. Raises OSError."""
    try:
        os.link(private, place)
        return True
    except FileExistsError:
        # Over NFS the server's answer may be lost, and the link requested again.
        with contextlib.suppress(FileNotFoundError):
            return place.samefile(private)
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
    try:
        file = open_to_write(place, "xb")
    except FileExistsError:
        return False
    try:
        with file:
            file.write(read_regular_file(private))
    except OSError:
        with contextlib.suppress(OSError):
            place.unlink()  # a part of it, if the disk is full
        raise
    return True


def read_owner(place: Path, renew: Owner | None = None) -> OwnerFile:
    """Read owner.json; if its owner is `renew`, set its modification time to now. Raises OSError.

    The file is opened each time, which makes NFS ask the server. The time is set through the open file, which cannot be
    another start's.
    """
    with os.fdopen(open_regular_file(place, follow=True), "rb") as file:
        for _ in range(10):
            if (owner := _parse(file.read(MOST_BYTES))) is not None:
                break
            time.sleep(0.05)  # on a file system without links it may still be incomplete
            file.seek(0)
        if owner is not None and owner == renew:
            os.utime(file.fileno())
        status = os.fstat(file.fileno())
    return OwnerFile(owner, status.st_ino, status.st_mtime_ns)


@functools.lru_cache(maxsize=8)  # an owner reads its own file before each write
def _parse(content: bytes) -> Owner | None:
    """The owner in the contents of owner.json; None if they are incomplete or not from this program."""
    try:
        owner = Owner(**json.loads(content))
        str(owner)
        is_valid = 0 < owner.pid < 2**31 and all(
            isinstance(text, str) for text in (owner.token, owner.host, owner.machine, owner.started, owner.job)
        )
        return owner if is_valid else None
    except (ValueError, TypeError, OverflowError, RecursionError, OSError):
        return None


def has_owner(run: Path) -> bool:
    """Whether a start that seems alive owns the run in a folder."""
    try:
        return read_owner(run / FILE).seems_alive()
    except OSError:
        return False


def remove_owner(directory: Path, judged: OwnerFile, by: Owner) -> None:
    """Remove the entry `judged` of an owner, but not that of another start that has become the owner meanwhile.

    `by`: this start. Raises OSError.
    """
    aside = directory / f".owner-{by.token}.gone"
    try:
        (directory / FILE).rename(aside)
    except FileNotFoundError:
        return
    removed = read_owner(aside)
    if (removed.owner, removed.inode) != (judged.owner, judged.inode):
        publish_owner(aside, directory / FILE)
    aside.unlink()


def age_text(seconds: float) -> str:
    """A duration for messages: in seconds, minutes or hours."""
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36000 else f"{seconds / 3600:.0f} h"
