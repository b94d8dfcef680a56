"""How a start becomes the owner of a run.

A new start that finds an owner decides whether it is dead:

* on the same host it asks the system whether the process is alive; the run of a dead process is taken over at once;
* an owner on another host counts as dead after STALE_SECONDS without a sign of life. The clocks of hosts differ, so
  they are never compared: the file server gives the age of the file, and this host's own clock measures that the file
  does not change for another CONFIRM_SECONDS, because on some file systems each host sets the times of its files.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from accelerate import Accelerator

from accel_train.errors import UserError, print_line
from accel_train.launch.agreement import broadcast_from_main
from accel_train.ownership.owner import (
    BEAT_SECONDS,
    FILE,
    STALE_SECONDS,
    UNFINISHED,
    Lease,
    Owner,
    OwnerFile,
    age_text,
    claim_next,
    publish_owner,
    read_owner,
    remove_empty,
    remove_owner,
    write_private,
)

CONFIRM_SECONDS = 2.5 * BEAT_SECONDS
POLL_SECONDS = 1.0  # between two attempts of a start that waits


def remove_unfinished_writes(directory: Path) -> None:
    """Remove the temporary files of earlier owners of the run in `directory`: what they had not written by now, they
    never will. Raises OSError."""
    for pattern in (f".*{UNFINISHED}", f"*/.*{UNFINISHED}"):
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)


def new_directory(recipe: str) -> tuple[Path, tuple[Path, ...]]:
    """Create runs/RECIPE/YYYY-MM-DD_HH-MM-SS (local time), or the next free name with a number.

    No other process gets the same folder. Returns it and all folders that were created, the deepest first. Call it on
    one process, and send the result to the others. Raises UserError.
    """
    first = Path("runs") / recipe / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for number in itertools.count(1):
        path = first if number == 1 else first.with_name(f"{first.name}_{number}")
        created = make_directory(path.parent)
        try:
            path.mkdir()
            return path, (path, *created)
        except (FileExistsError, FileNotFoundError):  # or another start has just removed the empty parent
            continue
        except OSError as error:
            raise cannot_be_written(path, error) from error
    raise AssertionError


def make_directory(path: Path) -> tuple[Path, ...]:
    """Create a folder and its parents; return those that were missing, the deepest first. Raises UserError."""
    try:
        missing = tuple(folder for folder in (path, *path.parents) if not folder.exists())
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_be_written(path, error) from error
    return missing


def cannot_be_written(path: Path, error: OSError) -> UserError:
    """The error to raise if the folder of a run cannot be created or written."""
    if isinstance(error, FileExistsError):
        return UserError(f"--output-dir: {path} is a file, not a folder. Give another folder.")
    return UserError(f"--output-dir: {path} cannot be written ({error.strerror}). Give another folder.")


class Claim:
    """The attempts of a start to become the owner: the main process calls `attempt` until it succeeds.

    Each attempt is short, because the other processes wait in a collective for its result.
    """

    def __init__(
        self,
        directory: Path | None,
        stopped: Callable[[], str],
        *,
        recipe: str = "",
        take_over: bool = False,
        how: str = "--take-over true",
    ) -> None:
        """`directory`: of the run; None: a new one in runs/`recipe`. `stopped`: returns the reason once this start
        should end instead of waiting for a silent owner, else "". `how`: what the user gives for `take_over`."""
        self.directory, self.stopped, self.recipe = directory, stopped, recipe
        self.take_over, self.how = take_over, how
        self.owner = Owner.of_this_process()
        self._waiting_since: float | None = None
        self._first_look: OwnerFile | None = None  # at the current owner
        self._last_look: OwnerFile | None = None
        self._last_change = 0.0  # when the owner file was first seen in its present state

    def attempt(self) -> tuple[Path, Owner | None, tuple[Path, ...], int] | None:
        """Try once to become the owner. Returns the directory, this start's entry as its owner, the folders that
        were created and its generation; or None if it has to be called again.

        The owner is None if the directory holds a finished run and cannot be written. Raises UserError.
        """
        if self.directory is None:
            directory, created = new_directory(self.recipe)
        else:
            directory = self.directory
            created = make_directory(directory)
        place = directory / FILE
        try:
            private = write_private(directory, self.owner)
            try:
                published = publish_owner(private, place)
                if not published:
                    with contextlib.suppress(FileNotFoundError):  # the owner has just released it
                        seen = read_owner(place)
                        age = max(0.0, (private.stat().st_mtime_ns - seen.changed) / 1e9)
                        if self._is_free(directory, seen, age):
                            published = publish_owner(private, place)
            finally:
                private.unlink(missing_ok=True)
            if not published:
                return None
            try:
                generation = claim_next(directory)
                # Only now: an earlier owner that still writes either finds this one, or has its unfinished write here.
                remove_unfinished_writes(directory)
            except OSError:
                place.unlink()
                raise
        except OSError as error:
            remove_empty(created)
            if (directory / "result.json").is_file():
                return directory, None, (), 0
            raise cannot_be_written(directory, error) from error
        return directory, self.owner, created, generation

    def _is_free(self, directory: Path, seen: OwnerFile, age: float) -> bool:
        """Remove the owner if it is dead and return True; else wait a moment and return False.

        `age`: seconds since its last sign of life, by the file server's clock. Raises UserError if the owner is alive.
        """
        now = time.monotonic()
        if self._first_look is None or self._first_look.owner != seen.owner:
            self._first_look = seen
        if self._last_look != seen:
            self._last_look, self._last_change = seen, now
        silent = now - self._last_change
        lives = seen.lives()
        dead = lives is False or (lives is None and max(age, silent) >= STALE_SECONDS and silent >= CONFIRM_SECONDS)
        if dead or self.take_over:
            if not dead:
                print_line(f"accel-train: {directory} is taken over from {seen.who}")
            remove_owner(directory, seen, self.owner)
            return True
        if reason := self.stopped():
            raise UserError(f"Stopped by {reason} while waiting for {directory}, which has an owner: {seen.who}.")
        in_job = bool(self.owner.job)
        same_job = in_job and seen.owner is not None and seen.owner.job == self.owner.job
        shows_life = lives or (self._first_look.changed != seen.changed and silent < CONFIRM_SECONDS)
        self._waiting_since = self._waiting_since or now
        waits_for_its_end = shows_life and same_job and now - self._waiting_since < STALE_SECONDS
        waits_in_doubt = not shows_life and (in_job or age >= STALE_SECONDS)
        if not (waits_for_its_end or waits_in_doubt):
            raise UserError(
                f"{directory} has an owner: {seen.who}; its last sign of life is {age_text(age)} old. A run can "
                f"have only one writer: wait until it ends, or stop it. To take over the run: {self.how}."
            )
        if now == self._waiting_since:
            most = CONFIRM_SECONDS if waits_in_doubt and age >= STALE_SECONDS else STALE_SECONDS
            what = "it to end" if waits_for_its_end else "another one; without one it counts as dead"
            print_line(
                f"accel-train: {directory} has an owner: {seen.who}; its last sign of life is {age_text(age)} old. "
                f"Waiting at most {most:.0f} s for {what}"
            )
        time.sleep(POLL_SECONDS)
        return False


def claim_run(accelerator: Accelerator, claim: Claim) -> Lease:
    """Make this start the owner of its run's directory, which is created if it does not exist.

    Collective; waits for an owner that may be dead. Raises UserError if another start owns the run.
    """
    while (claimed := broadcast_from_main(accelerator, claim.attempt)) is None:
        pass  # one short attempt at a time, so that the others do not wait in one long collective
    return Lease(*claimed, renews=accelerator.is_main_process)
