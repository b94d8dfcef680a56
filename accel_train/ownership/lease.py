"""One run, one writer: the file owner.json in a run's directory names the start that has the run, its owner.

The owner shows every few seconds that it lives: it renews the file's time of change. Before it writes anything it
looks whether the file is still its own; if another start has taken the run over (it had been suspended, or cut off
from the file system), it ends without writing.

Locks of files are not to be relied on where runs lie: NFS may be mounted without them, and some parallel file systems
keep them on one host only. All that is used here is a hard link, which is made by the file server, whole and for one
host only, and a rename.

A new start judges the owner that it finds:

* on the same host it asks the system whether that process lives; a dead one's run is taken over at once;
* elsewhere, an owner that has not shown for STALE_SECONDS that it lives is taken for dead. Clocks of hosts differ, so
  none is compared with another: the file server says how old the file is, and this host's own clock measures that it
  does not change for CONFIRM_SECONDS more, for on some file systems each host sets the times of its files itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from accel_train.errors import UserError
from accel_train.launch.process import hostname, is_gone, machine, started
from accel_train.ownership.folders import remove_empty

FILE = "owner.json"


BEAT_SECONDS = 10.0  # between two signs of life


STALE_SECONDS = 120.0  # without a sign of life: dead. One that holds Python's lock for long is not


CONFIRM_SECONDS = 2.5 * BEAT_SECONDS


LOOK_SECONDS = 1.0  # how long the answer counts that the run is still ours, for lines of logs; asked anew for the rest


MOST_BYTES = 10_000  # of owner.json


POLL_SECONDS = 1.0  # between two looks of a start that waits


NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # a file system without hard links


class LostError(UserError):
    """Another start has taken the run over."""


@dataclass(frozen=True)
class Owner:
    """One start of a run, as owner.json names it."""

    token: str
    host: str
    machine: str
    pid: int
    started: str
    """When the process began, see `process.started`."""
    job: str
    """The batch system's number of the job, or ""."""
    since: float
    """When it became the owner, by its host's clock: for people only."""

    @classmethod
    def of_this_process(cls) -> Owner:
        job = os.environ.get("SLURM_JOB_ID", os.environ.get("PBS_JOBID", ""))
        token, pid = uuid.uuid4().hex, os.getpid()
        return cls(token, hostname(), machine(), pid, started(pid), job, round(time.time(), 3))

    def lives(self) -> bool | None:
        """Whether the process is alive; None if that cannot be asked here."""
        if self.machine != machine():
            return None
        return not is_gone(self.pid, self.started)

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        since = datetime.fromtimestamp(self.since).isoformat(" ", "seconds")
        return f"process {self.pid} on {self.host}{job}, since {since}"


class Lease:
    """The run's directory and its owner, on each process of that start; the main process keeps the owner alive."""

    def __init__(
        self, directory: Path, owner: Owner | None, made: tuple[Path, ...] = (), *, keeps: bool = False
    ) -> None:
        """`owner`: this start; None if it only reads the directory. `made`: folders that this start has made."""
        self.directory, self.owner, self._keeps, self._made = directory, owner, keeps, made
        self._looked = time.monotonic()
        self._lost_to = ""
        self._released = owner is None
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="owner", daemon=True)
        if keeps and owner is not None:
            self._thread.start()

    def holds(self, *, fresh: bool = False) -> bool:
        """Whether the run is still this start's. The answer may be LOOK_SECONDS old unless it has to be `fresh`."""
        return self._ask(fresh=fresh, renew=False)

    def check(self, *, fresh: bool = False) -> None:
        """Raise LostError if another start has taken the run over; call it before each write."""
        if not self.holds(fresh=fresh):
            raise LostError(
                f"Another start has taken {self.directory} over: {self._lost_to}. This one ends here, and writes "
                "nothing more."
            )

    def release(self) -> None:
        """Give the run back, and remove the folders that this start has made if nothing is in them."""
        self._leaving.set()
        with self._lock:
            if self._released:
                return
            self._released = True
            if not self._keeps:
                return
            with contextlib.suppress(OSError, ValueError):
                if read_owner(self.directory / FILE).owner == self.owner:
                    (self.directory / FILE).unlink()
        if self._made:
            remove_empty((self.directory / "checkpoints", *self._made))

    def release_within(self, seconds: float) -> None:
        """The same for a process that is about to be ended at once, and must not wait for a file system that hangs."""
        thread = threading.Thread(target=self.release, daemon=True)
        thread.start()
        thread.join(seconds)

    def _keep(self) -> None:
        """In a thread: show that this start lives, and notice early if the run has been lost."""
        while not self._leaving.wait(BEAT_SECONDS):
            self._ask(fresh=True, renew=True)

    def _ask(self, *, fresh: bool, renew: bool) -> bool:
        with self._lock:
            now = time.monotonic()
            if not self._lost_to and not self._released and (fresh or now - self._looked >= LOOK_SECONDS):
                with contextlib.suppress(OSError):  # a file system that does not answer takes no writes either
                    self._look(renew=renew)
                self._looked = now
            return not self._lost_to

    def _look(self, *, renew: bool) -> None:
        place = self.directory / FILE
        try:
            seen = read_owner(place, renew=self.owner if renew else None)
        except FileNotFoundError:
            if not self._keeps or self.owner is None or not self.directory.is_dir():
                return
            # Somebody has deleted it. Where the name is free the run is still ours: nobody else has it.
            private = write_private(self.directory, self.owner)
            try:
                publish(private, place)
            finally:
                private.unlink(missing_ok=True)
            seen = read_owner(place)
        if seen.owner != self.owner:
            self._lost_to = seen.who


@dataclass(frozen=True)
class Seen:
    """A look at owner.json."""

    owner: Owner | None
    """None if the file is not a program's of this kind, or is still being written."""
    inode: int
    changed: int
    """Its time of change, by the file server's clock, in nanoseconds."""

    @property
    def who(self) -> str:
        return f"a start that {FILE} does not name" if self.owner is None else str(self.owner)


def write_private(directory: Path, owner: Owner) -> Path:
    path = directory / f".owner-{owner.token}.tmp"
    try:
        path.write_text(json.dumps(dataclasses.asdict(owner), indent=2) + "\n")
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()  # the disk is full
        raise
    return path


def publish(private: Path, place: Path) -> bool:
    """Give the file `private` the name `place` if that is free, for one host alone. Returns whether it was."""
    try:
        os.link(private, place)
        return True
    except FileExistsError:
        # Over NFS the answer may be lost, and the link asked for once more.
        with contextlib.suppress(FileNotFoundError):
            return place.samefile(private)
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
    try:
        with place.open("xb") as file:
            file.write(private.read_bytes())
        return True
    except FileExistsError:
        return False


def read_owner(place: Path, renew: Owner | None = None) -> Seen:
    """Look at owner.json; if its owner is `renew`, renew its time of change. Raises OSError.

    It is opened each time: so NFS asks the server. Renewed is the open file, which is no other's.
    """
    with place.open("rb") as file:
        for _ in range(10):
            if (owner := _parse(file.read(MOST_BYTES))) is not None:
                break
            time.sleep(0.05)  # without links it may still be being written
            file.seek(0)
        if owner is not None and owner == renew:
            os.utime(file.fileno())
        status = os.fstat(file.fileno())
    return Seen(owner, status.st_ino, status.st_mtime_ns)


def _parse(content: bytes) -> Owner | None:
    try:
        owner = Owner(**json.loads(content))
        str(owner)
        right = 0 < owner.pid < 2**31 and all(
            isinstance(text, str) for text in (owner.token, owner.host, owner.machine, owner.started, owner.job)
        )
        return owner if right else None
    except (ValueError, TypeError, OverflowError, RecursionError, OSError):
        return None


def remove_owner(directory: Path, judged: Seen, by: Owner) -> None:
    """Remove the owner that was judged, and no other one that has come meanwhile."""
    aside = directory / f".owner-{by.token}.gone"
    try:
        (directory / FILE).rename(aside)
    except FileNotFoundError:
        return
    found = read_owner(aside)
    if (found.owner, found.inode) != (judged.owner, judged.inode):
        publish(aside, directory / FILE)
    aside.unlink()


def age_text(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36000 else f"{seconds / 3600:.0f} h"
