"""One run, one owner: which start a run belongs to, and how that start keeps it.

owner.json names the start that owns the run, generations/ counts the starts that did. claim.py says how a start becomes
the owner.

File locks are not reliable where runs are stored: NFS may be mounted without them, and on some parallel file systems
they only work within one host. So only two operations are used for owner.json: a hard link, which the file server
creates atomically and for one host only, and a rename.

A start that slept through a whole other start finds its own name, or none, in owner.json, and must still see that it
has a successor. So each owner gets the next number, its generation, by creating generations/00000003.json exclusively,
which is atomic on NFS, too, and needs no hard links. When it begins to train it writes into the file from which update,
and the file stays when it releases the run. Everything that an owner writes names its generation. So readers can leave
out what an owner wrote after a later one had begun: a checkpoint or a result that is late.

The owner shows every few seconds that it is alive: it renews the modification time of owner.json. Before it writes
anything it checks that the file still names it. If another start has taken over the run (while this one was suspended,
or cut off from the file system), it ends without writing.

An owner can be stopped between this check and the write itself, and wake up after the next owner has ended. So the
order is: fill a temporary file, or open the log; check; rename, or append. A new owner first puts its name into
owner.json, and then removes all temporary files and replaces the log by a copy. So the old owner either finds the new
name, or its rename fails, or it appends to a file that nobody reads any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from accel_train.errors import UserError
from accel_train.files import (
    atomic_replacement,
    atomic_write,
    is_count,
    open_regular_file,
    open_to_write,
    read_json_object,
    read_regular_file,
)
from accel_train.launch.process import has_ended, hostname, job_id, machine_id, start_time

FILE = "owner.json"
GENERATIONS = "generations"  # the folder
MOST_BYTES = 10_000  # of owner.json
UNFINISHED = ".owners.tmp"  # how the names of an owner's temporary files end: commands such as evaluate have others
BEAT_SECONDS = 10.0  # between two signs of life
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
    """The job's number in the batch system, or ""."""
    since: float
    """When it became the owner, by its host's clock. Only for messages."""

    @classmethod
    def of_this_process(cls) -> Owner:
        token, pid = uuid.uuid4().hex, os.getpid()
        return cls(token, hostname(), machine_id(), pid, start_time(pid), job_id(), round(time.time(), 3))

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
            _let_all_read(file)
            file.write(f"{json.dumps(dataclasses.asdict(owner), indent=2)}\n".encode())
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()  # a part of it, if the disk is full
        raise
    return path


def _let_all_read(file: IO[bytes]) -> None:
    """Whatever the umask: an owner that cannot read who has taken the run over would go on."""
    with contextlib.suppress(OSError):  # a file system without permissions
        os.fchmod(file.fileno(), 0o644)


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
            _let_all_read(file)
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


def claim_next(directory: Path) -> int:
    """Begin the next generation of the run in `directory`; return its number. Raises OSError.

    The number is also higher than those in status.json and result.json: somebody may have copied them alone.
    """
    (directory / GENERATIONS).mkdir(exist_ok=True)
    copied = [generation_of(read_json_object(directory / name)) for name in ("status.json", "result.json")]
    while True:
        number = max([*_generations(directory), *copied, 0]) + 1
        with contextlib.suppress(FileExistsError):
            open_to_write(_generation_file(directory, number), "xb").close()
            return number


def begin_generation(directory: Path, number: int, update: int, write: Callable[[Path, str], None]) -> None:
    """Record with `write` that the owner `number` trains from `update` on. Earlier records are no longer needed."""
    write(_generation_file(directory, number), json.dumps({"generation": number, "update": update}) + "\n")
    for earlier in _generations(directory):
        if earlier < number:
            with contextlib.suppress(OSError):
                _generation_file(directory, earlier).unlink()


def return_generation(directory: Path, number: int) -> None:
    """Remove the generation of an owner that has not begun to train, and the folder if it is empty."""
    with contextlib.suppress(OSError):
        if not _generation_file(directory, number).stat().st_size:
            _generation_file(directory, number).unlink()
        (directory / GENERATIONS).rmdir()


def last_begun(directory: Path) -> tuple[int, int]:
    """The newest generation that has begun to train, and the update from which; (0, 0) if none has. Raises OSError."""
    for number in sorted(_generations(directory), reverse=True):
        record = read_json_object(_generation_file(directory, number))
        if is_count(record.get("update")):
            return number, int(record["update"])
    return 0, 0


def generation_of(record: Mapping[str, Any]) -> int:
    """The generation that a record of a run names, from 1; 0 if it names none."""
    number = record.get("generation", 0)
    return number if is_count(number) else 0


def is_late(directory: Path, record: Mapping[str, Any], update: int | None = None) -> bool:
    """Whether an earlier owner wrote `record` after a later one had begun to train the run in `directory`.

    `update`: of a checkpoint. One that the later owner may have begun from is not late. Without it `record` is a
    result: the later owner has renamed an earlier one before it began. Raises OSError.
    """
    number, began_at = last_begun(directory)
    return 0 < generation_of(record) < number and (update is None or update > began_at)


def read_result(run: Path) -> dict[str, Any]:
    """The content of the result of the run in the folder `run`; {} if it is not finished, or its result is damaged.

    A late result is none. Raises OSError.
    """
    result = read_json_object(run / "result.json")
    return {} if is_late(run, result) else result


def _generations(directory: Path) -> list[int]:
    try:
        stems = [path.stem for path in (directory / GENERATIONS).iterdir() if path.suffix == ".json"]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [int(stem) for stem in stems if stem.isascii() and stem.isdigit()]


def _generation_file(directory: Path, number: int) -> Path:
    return directory / GENERATIONS / f"{number:08d}.json"


class LostError(UserError):
    """Another start has taken over the run."""


class Lease:
    """The ownership of a run's directory, on each process of a start; the main process renews it."""

    def __init__(
        self,
        directory: Path,
        owner: Owner | None,
        created: tuple[Path, ...] = (),
        number: int = 0,
        *,
        renews: bool = False,
    ) -> None:
        """`owner`: this start; None if it only reads the directory. `created`: folders that this start has created.
        `number`: its generation. `renews`: this process shows that the owner is alive, in a thread.
        """
        self.directory, self.owner, self._renews, self._created = directory, owner, renews, created
        self.generation, self._has_begun = number, False
        self._lost_to = ""
        self._released = owner is None
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_released, name="owner", daemon=True)
        if renews and owner is not None:
            self._thread.start()

    def holds(self) -> bool:
        """Whether this start still owns the run."""
        return self._check(renew=False)

    def check(self) -> None:
        """Raise LostError if another start has taken over the run. Call it right before each write."""
        if not self.holds():
            raise LostError(
                f"Another start has taken {self.directory} over: {self._lost_to}. This one ends, and writes "
                "nothing more."
            )

    def begin(self, update: int) -> None:
        """Record that this start trains from `update` on: from now on nothing of earlier owners is accepted.

        Raises OSError.
        """
        if self.generation:
            begin_generation(self.directory, self.generation, update, self.write)
            self._has_begun = True

    def replacing(self, path: Path) -> contextlib.AbstractContextManager[Path]:
        """As `files.atomic_replacement`, for a file of the run. Raises LostError and OSError."""
        return atomic_replacement(path, check=self.check, ending=UNFINISHED)

    def write(self, path: Path, content: str | bytes, *, durable: bool = True) -> None:
        """As `files.atomic_write`, for a file of the run. Raises LostError and OSError."""
        atomic_write(path, content, durable=durable, check=self.check, ending=UNFINISHED)

    def append(self, path: Path, content: bytes) -> None:
        """Append to a file of the run, all of it or nothing. Raises LostError and OSError."""
        with open_to_write(path, "ab", buffering=0) as file:
            self.check()
            size, written = os.fstat(file.fileno()).st_size, 0
            try:
                while written < len(content):
                    written += file.write(content[written:])
            except OSError:
                if written:
                    file.truncate(size)
                raise

    def release(self) -> None:
        """Give up the ownership, and remove the folders that this start has created if they are empty."""
        self._leaving.set()
        with self._lock:
            if self._released:
                return
            self._released = True
            if not self._renews:
                return
            with contextlib.suppress(OSError, ValueError):
                if read_owner(self.directory / FILE).owner == self.owner:
                    if not self._has_begun:
                        return_generation(self.directory, self.generation)
                    (self.directory / FILE).unlink()
        if self._created:
            remove_empty((self.directory / "checkpoints", *self._created))

    def release_within(self, seconds: float) -> None:
        """As `release`, but wait at most `seconds`: for a process that ends at once, even if the file system hangs."""
        thread = threading.Thread(target=self.release, daemon=True)
        thread.start()
        thread.join(seconds)

    def _renew_until_released(self) -> None:
        """In a thread: show that this start is alive, and notice early if the run was taken over."""
        while not self._leaving.wait(BEAT_SECONDS):
            self._check(renew=True)

    def _check(self, *, renew: bool) -> bool:
        """Whether this start still owns the run: reads owner.json."""
        with self._lock:
            if not self._lost_to and not self._released:
                with contextlib.suppress(OSError):  # a file system that does not answer accepts no writes either
                    self._read_file(renew=renew)
            return not self._lost_to

    def _read_file(self, *, renew: bool) -> None:
        """Read owner.json, restore it if it was deleted, and note if another start owns or owned the run since.

        Raises OSError.
        """
        place = self.directory / FILE
        try:
            seen = read_owner(place, renew=self.owner if renew else None)
        except FileNotFoundError:
            if self._has_successor() or not self._renews or self.owner is None or not self.directory.is_dir():
                return
            # Somebody has deleted it. As long as nobody has trained the run since, it is still ours.
            private = write_private(self.directory, self.owner)
            try:
                if self._has_successor():  # now the file server has told what is in the directory
                    return
                publish_owner(private, place)
            finally:
                private.unlink(missing_ok=True)
            seen = read_owner(place)
            if seen.owner == self.owner and self._has_successor():  # this process was stopped before it wrote the file
                place.unlink()
                return
        if seen.owner != self.owner:
            self._lost_to = seen.who

    def _has_successor(self) -> bool:
        """Whether another start has trained the run since, even if it has ended; noted. Raises OSError."""
        if last_begun(self.directory)[0] > self.generation > 0:
            self._lost_to = "a start that has trained it since, and has ended"
        return bool(self._lost_to)


def remove_empty(folders: tuple[Path, ...]) -> None:
    """Remove those of the folders that are empty. They must be given with the deepest first."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
