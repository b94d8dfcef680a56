"""When to save and when to stop: signals, files and the clock, agreed on by all processes.

A decision must be taken at the same update by everyone, or some wait in a collective for others that have left. So at
each update's end the processes add what each wants to an all-reduce of two integers, on the host, through a gloo group
of its own. It runs in the background while the next update computes, and is read at that update's end: nobody waits
for a GPU, and the decision is everybody's one update later.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from accel_train.errors import print_line
from accel_train.launch.environment import in_job
from accel_train.launch.rendezvous import connecting, set_collective_timeout
from accel_train.launch.signals import WARNINGS, came_too_early, note, noted

Batch = TypeVar("Batch")

SIGNALS = (signal.SIGINT, *WARNINGS)
LOOK_SECONDS = 1.0  # between two looks for the files STOP and SAVE
ECHO_SECONDS = 1.0  # one Ctrl-C comes twice: from the terminal, and from the launcher that hands it on


class StopAskedError(Exception):
    """All processes have agreed to stop, in the middle of an evaluation."""


class Stopping:
    """Gathers wishes to save or to stop. A context manager: on leaving it, the signals mean what they did before.

    Enter it as early as possible: a signal that comes while the program is setting itself up is obeyed at the first
    update, instead of losing the job its place. So is one that `signals.noting` has noted before.
    """

    def __init__(self) -> None:
        self.reason = ""  # of this process's wish to stop
        self.run: Path | None = None  # set on the main process only, which looks for files and at the clock
        self.save_every_seconds = 0.0
        self.saves_asked = self.saves_done = 0
        self.last_save = self.last_look = 0.0
        self._owes_save = False
        self._ctrl_c = _CtrlC(self)
        self._group: Any = None
        self._wishes = torch.zeros(2, dtype=torch.int64)
        self._reduction: Any = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        self.reason = self.reason or noted() or came_too_early()
        return self

    def __exit__(self, *_: object) -> None:
        self._ctrl_c.forget()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def begin(self, run: Path | None, save_every_seconds: float, connect_seconds: float) -> None:
        """Training begins; all processes must call it. `run`, on the main process only, is the folder in which a
        person may put a file STOP or SAVE; `save_every_seconds` of 0 is never. Raises UserError if the processes
        cannot connect within `connect_seconds`."""
        self.run, self.save_every_seconds = run, save_every_seconds
        self._ctrl_c.listen()
        self.last_save = time.monotonic()
        self.last_look = -math.inf  # a file STOP that is there already counts, however short the training is
        if dist.is_initialized() and dist.get_world_size() > 1:
            with connecting():
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=connect_seconds))
            # From now on its time-out would strike with an error that says nothing: the watchdog ends what hangs.
            set_collective_timeout(timedelta(days=365).total_seconds(), self._group)

    def end(self) -> None:
        """Training has ended on all processes; what they last agreed on no longer matters."""
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            note(number)
            self.reason = signal.Signals(number).name
        elif not self._ctrl_c.listens:
            raise KeyboardInterrupt  # asked for twice, or nothing to save yet: at once

    def agreed(self) -> tuple[bool, bool]:
        """Call at each update's end, on every process. Returns (stop, save) as all processes wanted them when the
        update before ended; without other processes, as wanted now."""
        self._look_around()
        if self._group is None:
            return self._decide(bool(self.reason), self.saves_asked)
        mine = torch.tensor([int(bool(self.reason)), self.saves_asked])
        if self._reduction is not None:
            self._reduction.wait()
        wishes, self._wishes = self._wishes, mine
        self._reduction = dist.all_reduce(self._wishes, dist.ReduceOp.MAX, group=self._group, async_op=True)
        stop, saves = wishes.tolist()
        return self._decide(bool(stop), saves)

    def heeded(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches of an evaluation, as many on each process; raises StopAskedError once all agree to stop.

        A save that is agreed on meanwhile is made after the next update.
        """
        for batch in batches:
            yield batch
            stop, save = self.agreed()
            self._owes_save |= save
            if stop:
                raise StopAskedError

    def saved(self) -> None:
        """A checkpoint was made: the clock for the next begins."""
        self.last_save = time.monotonic()

    def _decide(self, stop: bool, saves: int) -> tuple[bool, bool]:
        save = saves > self.saves_done or self._owes_save
        self.saves_done, self._owes_save = max(saves, self.saves_done), False
        return stop, save

    def _look_around(self) -> None:
        """What only the main process sees: the clock, and files laid into the run's folder."""
        now = time.monotonic()
        if self.run is None or now - self.last_look < LOOK_SECONDS:
            return
        self.last_look = now
        if self.save_every_seconds and now - self.last_save > self.save_every_seconds:
            self._ask_for_save()
        if _take(self.run / "SAVE"):
            self._ask_for_save()
        if _take(self.run / "STOP"):
            self.reason = "the file STOP"

    def _ask_for_save(self) -> None:
        if self.saves_asked == self.saves_done:  # one that is asked for and not yet agreed on is enough
            self.saves_asked += 1


class _CtrlC:
    """Hears Ctrl-C at once, and answers.

    Python calls a signal's handler between two of its own instructions, and a whole backward pass is one of them. But
    its handler in C writes the number of each signal into a pipe at once. A thread reads from there.
    """

    def __init__(self, stopping: Stopping) -> None:
        self.listens = False  # if not, Ctrl-C interrupts the main thread
        self._again = {signal.SIGINT}
        self._stopping = stopping
        self._thread: threading.Thread | None = None

    def listen(self) -> None:
        """From now on the first Ctrl-C is a wish to stop, and a second one interrupts the main thread."""
        self._output, self._input = os.pipe()
        os.set_blocking(self._input, False)
        self._before = signal.set_wakeup_fd(self._input, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._answer, name="ctrl-c", daemon=True)
        self._thread.start()
        self.listens = True
        if "TORCHELASTIC_RUN_ID" in os.environ and not in_job():
            self._again.add(signal.SIGTERM)  # the launcher, whose ranks are not the terminal's, makes it of the second

    def forget(self) -> None:
        """Ctrl-C means again what it did before."""
        self.listens = False
        if self._thread is not None:
            signal.set_wakeup_fd(self._before)
            os.write(self._input, bytes(1))  # no signal has this number
            self._thread.join()
            os.close(self._input)
            os.close(self._output)

    def _answer(self) -> None:
        first = None
        while number := os.read(self._output, 1)[0]:
            if not self.listens:
                continue
            if first is None and number == signal.SIGINT:
                first = time.monotonic()
                self._stopping.reason = "SIGINT"
                if self._stopping.run is not None:
                    print_line("accel-train: saving after this update; Ctrl-C again stops without saving", sys.stderr)
            elif first is not None and number in self._again and time.monotonic() - first > ECHO_SECONDS:
                self.listens = False
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # real: it ends waiting, too


def _take(path: Path) -> bool:
    """Whether the file is there; it is removed, so that it is obeyed once."""
    try:
        path.unlink()
    except OSError:
        return False
    return True
