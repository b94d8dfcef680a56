"""One run, one writer: while a start owns a run, it shows that it is alive and checks that the run is still its own.

The owner shows every few seconds that it is alive: it renews the modification time of owner.json. Before it writes
anything it checks that the file still names it. If another start has taken over the run (while this one was suspended,
or cut off from the file system), it ends without writing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from accel_train.errors import UserError
from accel_train.ownership.folders import remove_empty
from accel_train.ownership.owner import FILE, Owner, publish_owner, read_owner, write_private

BEAT_SECONDS = 10.0  # between two signs of life
LOOK_SECONDS = 1.0  # how long a check that the run is still ours is valid for lines of logs; other writes check again


class LostError(UserError):
    """Another start has taken over the run."""


class Lease:
    """The ownership of a run's directory, on each process of a start; the main process renews it."""

    def __init__(
        self, directory: Path, owner: Owner | None, created: tuple[Path, ...] = (), *, renews: bool = False
    ) -> None:
        """`owner`: this start; None if it only reads the directory. `created`: folders that this start has created.
        `renews`: this process shows that the owner is alive, in a thread."""
        self.directory, self.owner, self._renews, self._created = directory, owner, renews, created
        self._last_check = time.monotonic()
        self._lost_to = ""
        self._released = owner is None
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_released, name="owner", daemon=True)
        if renews and owner is not None:
            self._thread.start()

    def holds(self, *, fresh: bool = False) -> bool:
        """Whether this start still owns the run. The answer may be LOOK_SECONDS old unless `fresh` is set."""
        return self._check(fresh=fresh, renew=False)

    def check(self, *, fresh: bool = False) -> None:
        """Raise LostError if another start has taken over the run. Call it before each write."""
        if not self.holds(fresh=fresh):
            raise LostError(
                f"Another start has taken {self.directory} over: {self._lost_to}. This one ends, and writes "
                "nothing more."
            )

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
            self._check(fresh=True, renew=True)

    def _check(self, *, fresh: bool, renew: bool) -> bool:
        """Whether this start still owns the run; reads owner.json if `fresh` or if the last check is too old."""
        with self._lock:
            now = time.monotonic()
            if not self._lost_to and not self._released and (fresh or now - self._last_check >= LOOK_SECONDS):
                with contextlib.suppress(OSError):  # a file system that does not answer accepts no writes either
                    self._read_file(renew=renew)
                self._last_check = now
            return not self._lost_to

    def _read_file(self, *, renew: bool) -> None:
        """Read owner.json, restore it if it was deleted, and note if it names another start. Raises OSError."""
        place = self.directory / FILE
        try:
            seen = read_owner(place, renew=self.owner if renew else None)
        except FileNotFoundError:
            if not self._renews or self.owner is None or not self.directory.is_dir():
                return
            # Somebody has deleted it. As long as nobody else has created it, the run is still ours.
            private = write_private(self.directory, self.owner)
            try:
                publish_owner(private, place)
            finally:
                private.unlink(missing_ok=True)
            seen = read_owner(place)
        if seen.owner != self.owner:
            self._lost_to = seen.who
