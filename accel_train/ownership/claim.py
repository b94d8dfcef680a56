"""How a start of a run becomes its owner."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator

from accel_train.config.schema import Config
from accel_train.errors import UserError, print_line
from accel_train.launch.consensus import decided_by_main
from accel_train.ownership.folders import cannot_be_written, make_directory, new_directory, remove_empty
from accel_train.ownership.lease import (
    CONFIRM_SECONDS,
    FILE,
    LOOK_SECONDS,
    POLL_SECONDS,
    STALE_SECONDS,
    Lease,
    Owner,
    Seen,
    age_text,
    publish,
    read_owner,
    remove_owner,
    write_private,
)


class Claim:
    """How a start becomes the owner: the main process calls `attempt` until it succeeds, and tells the others.

    One step at a time, so that no collective in which they wait is long.
    """

    def __init__(self, config: Config, stopped: Callable[[], str]) -> None:
        """`stopped`: the reason, once the start shall end instead of waiting for an owner that is silent."""
        self.config, self.stopped = config, stopped
        self.owner = Owner.of_this_process()
        self._began: float | None = None  # to wait
        self._first: Seen | None = None  # look at the owner that is waited for
        self._last: Seen | None = None
        self._changed = 0.0  # when a look first showed what the last one shows
        self._took_over = False

    def attempt(self) -> tuple[Path, Owner | None, tuple[Path, ...]] | None:
        """One step: the directory, its owner from now on and the folders that were made; or None: ask again.

        The owner is None if the directory holds a finished run and cannot be written. Raises UserError.
        """
        if self.config.output_dir is None:
            directory, made = new_directory(self.config.recipe)
        else:
            directory = self.config.output_dir
            made = make_directory(directory)
        place = directory / FILE
        try:
            private = write_private(directory, self.owner)
            try:
                published = publish(private, place)
                if not published:
                    with contextlib.suppress(FileNotFoundError):  # it has just been given back
                        seen = read_owner(place)
                        age = max(0.0, (private.stat().st_mtime_ns - seen.changed) / 1e9)
                        if self._is_free(directory, seen, age):
                            published = publish(private, place)
            finally:
                private.unlink(missing_ok=True)
        except OSError as error:
            remove_empty(made)
            if (directory / "result.json").is_file():
                return directory, None, ()
            raise cannot_be_written(directory, error) from error
        if not published:
            return None
        if self._took_over:
            time.sleep(2 * LOOK_SECONDS)  # by then an owner that was alive has looked
        return directory, self.owner, made

    def _is_free(self, directory: Path, seen: Seen, age: float) -> bool:
        """Remove the owner if it is dead, or wait a moment if that is not known yet; UserError if it lives.

        `age`: the seconds since its last sign of life, as the file server says.
        """
        now = time.monotonic()
        if self._first is None or self._first.owner != seen.owner:
            self._first = seen
        if self._last != seen:
            self._last, self._changed = seen, now
        silent = now - self._changed
        lives = seen.owner.lives() if seen.owner is not None else None
        dead = lives is False or (lives is None and max(age, silent) >= STALE_SECONDS and silent >= CONFIRM_SECONDS)
        if dead or self.config.take_over:
            if not dead:
                self._took_over = True
                print_line(f"accel-train: {directory} is taken over from {seen.who}")
            remove_owner(directory, seen, self.owner)
            return True
        if reason := self.stopped():
            raise UserError(f"Stopped by {reason} while waiting for {directory}, which has an owner: {seen.who}.")
        in_job = bool(self.owner.job)
        same_job = in_job and seen.owner is not None and seen.owner.job == self.owner.job
        shows_life = lives or (self._first.changed != seen.changed and silent < CONFIRM_SECONDS)
        self._began = self._began or now
        waits_for_its_end = shows_life and same_job and now - self._began < STALE_SECONDS
        waits_in_doubt = not shows_life and (in_job or age >= STALE_SECONDS)
        if not (waits_for_its_end or waits_in_doubt):
            raise UserError(
                f"{directory} has an owner: {seen.who}; its last sign of life is {age_text(age)} old. One run has one "
                "writer: wait for its end, or stop it. To take the run from it: --take-over true."
            )
        if now == self._began:
            most = CONFIRM_SECONDS if waits_in_doubt and age >= STALE_SECONDS else STALE_SECONDS
            what = "its end" if waits_for_its_end else "another one; without it counts as dead"
            print_line(
                f"accel-train: {directory} has an owner: {seen.who}; its last sign of life is {age_text(age)} old. "
                f"Waiting {most:.0f} s at most for {what}"
            )
        time.sleep(POLL_SECONDS)
        return False


def claim_run(config: Config, accelerator: Accelerator, stopped: Callable[[], str]) -> Lease:
    """Make this start the owner of its run's directory, which is created if it is not there.

    Collective: it waits for an owner that may be dead. `stopped`: the reason, once this start shall end instead of
    waiting. Raises UserError if another start owns the run.
    """
    claim = Claim(config, stopped)
    while (claimed := decided_by_main(accelerator, claim.attempt)) is None:
        pass  # one step at a time, so that no collective in which the others wait is long
    return Lease(*claimed, keeps=accelerator.is_main_process)
