"""When to save and when to stop: requests by signals, files and the clock, on which all processes agree.

Importing torch takes seconds. A cluster's warning that came during that time would kill the program, or be lost where
the job script ignores it. So the command line has the signals recorded before that, this file imports torch only when
training begins, and `StopRequests` obeys what was recorded.

All processes must act on a request at the same update, or some wait in a collective for others that have left. So at
the end of each update an all-reduce of two integers combines the requests of all processes, on the host, through a
separate gloo group. It runs in the background while the next update computes, and is read at the end of that update:
nobody waits for a GPU, and all processes act one update later.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from accel_train.errors import UserError, print_line
from accel_train.launch.environment import in_job
from accel_train.launch.process import WARNED, start_folder

Batch = TypeVar("Batch")

POLL_SECONDS = 1.0  # between two checks for the files STOP and SAVE
LAUNCHER_DEATH = "the launcher's death"  # a reason to stop
ECHO_SECONDS = 1.0  # one Ctrl-C comes twice: from the terminal, and from the launcher, which passes it on

WARNINGS = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that clusters send. Ctrl-C is not one of them: before there is something to save, it ends the program."""

ENDINGS = (signal.SIGHUP, signal.SIGXCPU)
"""Of a terminal or ssh session that closes, and of a limit of processor time (`ulimit -t`)."""

FROM_LAUNCHER = ("SIGTERM", "SIGHUP")
"""The signals that a launcher passes on to its ranks when it ends. It sends SIGKILL 30 s later."""

recorded: list[int] = []
"""Those that have come until now."""


def recorded_stop_signal() -> str:
    """The name of the latest warning that was recorded, or ""."""
    return signal.Signals(recorded[-1]).name if recorded else ""


def warning_to_job_script() -> str:
    """What to call the warning that the job script has noted during this start of the job; "" if there was none."""
    start = start_folder()
    return "the warning before the job's end" if start is not None and (start / WARNED).exists() else ""


def stop_signals() -> list[signal.Signals]:
    """The signals that ask this process for a stop: of ENDINGS, those that would otherwise end it.

    So nohup's choice to ignore SIGHUP holds, and so does the handler of a program that embeds this one.
    """
    return [
        *WARNINGS,
        *(number for number in ENDINGS if signal.getsignal(number) in (signal.SIG_DFL, record_stop_signal)),
    ]


def record_stop_signal(number: int, _frame: Any = None) -> None:
    """Record a warning; a signal's handler."""
    recorded.append(number)


class StopAskedError(Exception):
    """All processes have agreed to stop before the run is finished."""


class StopRequests:
    """Collects requests to save or to stop. A context manager that restores the signals' handlers on leaving.

    Enter it as early as possible: a signal that comes during the program's setup is obeyed at the first update. So is a
    signal that was recorded before.
    """

    def __init__(self) -> None:
        self.reason = ""  # why this process requests a stop
        self.run: Path | None = None  # on the main process only, which checks the files and the clock
        self.save_every_seconds = 0.0
        self.saves_requested = self.saves_done = 0
        self.last_save = self.last_poll = 0.0
        self._save_is_pending = False
        self._listens_to_ctrl_c = False  # if not, it interrupts the main thread
        self._first_ctrl_c = math.inf  # when it came
        self._group: Any = None
        self._requests: Any = None  # int64 [2]: of all processes, at the end of the previous update
        self._reduction: Any = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is not threading.main_thread():
            raise UserError(
                "train was called in a thread, but Python gives signals to the main thread only: call it there."
            )
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, *stop_signals())}
        self.reason = self.reason or recorded_stop_signal() or warning_to_job_script()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def begin(self, run: Path | None, save_every_seconds: float, connect_seconds: float) -> None:
        """Start listening for requests, when training begins. Collective.

        `run`, on the main process only, is the folder in which a person may put a file STOP or SAVE.
        `save_every_seconds`: 0 is never. Raises UserError if the processes cannot connect within `connect_seconds`.
        """
        self.run, self.save_every_seconds = run, save_every_seconds
        self._listens_to_ctrl_c = True
        self.last_save = time.monotonic()
        self.last_poll = -math.inf  # a file STOP that exists already counts, even if training is short
        import torch

        from accel_train.compat import set_collective_timeout
        from accel_train.launch.agreement import connecting

        self._requests = torch.zeros(2, dtype=torch.int64)
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            with connecting():
                self._group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=connect_seconds))
            # Its time-out would raise an error without an explanation. From now on the watchdog ends what hangs.
            set_collective_timeout(timedelta(days=365).total_seconds(), self._group)

    def end(self) -> None:
        """Finish the last all-reduce, when training has ended on all processes; its result no longer matters."""
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None

    def _on_signal(self, number: int, _frame: Any) -> None:
        now, again = time.monotonic(), number == signal.SIGINT
        if number != signal.SIGINT:
            record_stop_signal(number)
            self.reason = signal.Signals(number).name
            # A launcher sends it to its ranks at the second Ctrl-C.
            again = number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ and not in_job()
        elif not self._listens_to_ctrl_c:
            raise KeyboardInterrupt  # there is nothing to save yet
        elif self._first_ctrl_c == math.inf:
            self.reason, self._first_ctrl_c = "SIGINT", now
            if self.run is not None:
                with contextlib.suppress(RuntimeError):  # the main thread is just writing there
                    print_line("accel-train: saving after this update; Ctrl-C again stops without saving", sys.stderr)
        if again and self._listens_to_ctrl_c and now - self._first_ctrl_c > ECHO_SECONDS:
            self._listens_to_ctrl_c = False
            raise KeyboardInterrupt

    def poll(self) -> tuple[bool, bool]:
        """Whether to stop, and whether to save: the requests of all processes at the end of the previous update.

        Collective; call it at each update's end. For a single process it returns the requests of this moment.
        """
        self._check_files_and_clock()
        if self._group is None:
            return self._decide(bool(self.reason), self.saves_requested)
        import torch

        mine = torch.tensor([int(bool(self.reason)), self.saves_requested])
        if self._reduction is not None:
            self._reduction.wait()
        requests, self._requests = self._requests, mine
        maximum = torch.distributed.ReduceOp.MAX
        self._reduction = torch.distributed.all_reduce(self._requests, maximum, group=self._group, async_op=True)
        stop, saves = requests.tolist()
        return self._decide(bool(stop), saves)

    def interruptible(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches of an evaluation, as many on each process; raises StopAskedError once all agree to stop.

        A save that is requested meanwhile is made after the next update.
        """
        for batch in batches:
            yield batch
            stop, save = self.poll()
            self._save_is_pending |= save
            if stop:
                raise StopAskedError

    def saved(self) -> None:
        """Restart the clock for the next save: a checkpoint was saved."""
        self.last_save = time.monotonic()

    def _decide(self, stop: bool, saves: int) -> tuple[bool, bool]:
        """(stop, save), where `saves` is the number of saves requested since the start of the run."""
        save = saves > self.saves_done or self._save_is_pending
        self.saves_done, self._save_is_pending = max(saves, self.saves_done), False
        return stop, save

    def _check_files_and_clock(self) -> None:
        """Check the clock and the files in the run's folder, on the main process."""
        now = time.monotonic()
        if self.run is None or now - self.last_poll < POLL_SECONDS:
            return
        self.last_poll = now
        if self.save_every_seconds and now - self.last_save > self.save_every_seconds:
            self.request_save()
        if _remove(self.run / "SAVE"):
            self.request_save()
        if _remove(self.run / "STOP"):
            self.reason = "the file STOP"
        self.reason = self.reason or warning_to_job_script()

    def ask(self, reason: str) -> None:
        """Ask for a stop, unless this process does already."""
        self.reason = self.reason or reason

    def request_save(self) -> None:
        """Ask for a checkpoint at the end of an update; one that is asked for and not made yet is enough."""
        if self.saves_requested == self.saves_done:  # at most one request at a time
            self.saves_requested += 1


def _remove(path: Path) -> bool:
    """Remove the file, so that it is obeyed once; return whether it existed."""
    try:
        path.unlink()
    except OSError:
        return False
    return True
