"""Ends a run that hangs or has lost a process: a thread in each process watches over all of them.

While one process waits for its disk, all others wait for it in a collective, and nothing says which one it is. So each
process counts its steps (a batch requested, a batch received, an update, a checkpoint), and every few seconds its
thread publishes the count, and words for it, in the process group's store. Then

* a process whose count does not change for --hang-timeout-seconds (until the first update at least for an hour,
  because downloads and compilation take long) ends the run. All processes write the stacks of all their threads to
  RUN/hang/rank-K.txt, and the message names the slow process: it does not answer at all, or has the lowest count;
* a process that has not been heard from for 45 s was killed, or its node is lost: the others end;
* a process that fails says why, before it leaves. The others then end for that reason, not for "connection closed".

The main process's thread checks all others, theirs check only the main one, so that the store gets few requests. Time
is measured in the thread's own ticks: while a cluster suspends the job, the ticks stop, too, and the job does not count
as hanging. A clock would go on. For the same reason collectives have no time-out of their own during training.

A thread that never releases the interpreter's lock stops the watchdog of its process, too. Other processes notice that.
Where there is only one, `kill -ABRT` writes the stacks of all its threads and ends it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, TypeVar

from accelerate import Accelerator
from torch import distributed

from accel_train.compat import process_group_store, set_collective_timeout
from accel_train.errors import UserError, print_line, reason_of
from accel_train.launch.accelerator import collective_seconds, start_seconds
from accel_train.launch.process import CODE, has_ended, hostname, restart_count, tell_job_script, write_stacks
from accel_train.launch.stopping import FROM_LAUNCHER, LAUNCHER_DEATH, StopRequests
from accel_train.records.directory import RunDirectory

Batch = TypeVar("Batch")

TICK_SECONDS = 2.0
SILENT_SECONDS = 45.0  # without a sign of life: dead. Long enough for a process that holds Python's lock
TERMINATION_SECONDS = 20.0  # launchers send SIGKILL 30 s after SIGTERM
STACKS_SECONDS = 10.0  # for the others to write their stacks
RELEASE_SECONDS = 5.0  # for the file system to delete a file
LEAVE_SECONDS = 20.0  # for a process to end by itself, once all know that they have to
STORE_SECONDS = 10.0  # time-out of the store's answer
MOST_NAMES = 4  # ranks that a message names


class Progress(NamedTuple):
    """What one process has published about itself."""

    beat: int
    """Ticks of its watchdog's thread: whether the process is alive."""
    steps: int
    """Steps that it has made: whether it makes progress."""
    update: int
    activity: str
    """What it does, as a verb with its object: "saves a checkpoint"."""
    host: str
    has_left: bool


class End(NamedTuple):
    """Why the run ends, as the first process that knew has announced it."""

    rank: int
    text: str
    with_stacks: bool
    """Whether all processes write their stacks."""
    code: int = 1
    """The exit code of all processes: that of the error, 1 unless the user's input is wrong."""


class ProgressStore:
    """What the watchdogs of all processes tell each other, in the process group's store; alone in one of its own.

    Its methods raise RuntimeError if the store does not answer.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        stores: Any = distributed
        # A separate connection, because the setup of a collective may hold the lock of the group's own for long.
        store = process_group_store().clone() if world_size > 1 else stores.HashStore()
        self._store = stores.PrefixStore(f"accel_train/watchdog/{restart_count()}", store)
        self._store.set_timeout(timedelta(seconds=STORE_SECONDS))
        self._last_heard: dict[int, tuple[int, int]] = {}  # rank: its last beat, and our beat when it came

    @property
    def others(self) -> list[int]:
        """The ranks of the other processes."""
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def publish(self, progress: Progress) -> None:
        """Publish the progress of this process."""
        self._store.set(f"rank/{self.rank}", json.dumps(progress))

    def progress(self, rank: int) -> Progress | None:
        """What a process has published; None before it begins to train."""
        if not self._store.check([f"rank/{rank}"]):
            return None
        return Progress(*json.loads(self._store.get(f"rank/{rank}")))

    def silent(self, beat: int, most: float) -> list[int]:
        """The ranks that have not been heard from for `most` beats of this process, which is at `beat`.

        The main process asks for all others, they only for the main one: so the store gets few requests.
        """
        found = []
        for rank in self.others if self.rank == 0 else [0]:
            progress = self.progress(rank)
            if progress is None:
                continue  # it has not begun
            if progress.has_left or rank not in self._last_heard or self._last_heard[rank][0] != progress.beat:
                self._last_heard[rank] = (progress.beat, beat)
            if not progress.has_left and beat - self._last_heard[rank][1] >= most:
                found.append(rank)
        return found

    def slowest(self, count: int) -> list[int]:
        """The ranks that have made the fewest steps; this process has made `count`."""
        published = {rank: self.progress(rank) for rank in self.others}
        counts = {rank: progress.steps for rank, progress in published.items() if progress} | {self.rank: count}
        return [rank for rank, steps in counts.items() if steps == min(counts.values())]

    def searches_first(self) -> bool:
        """Whether this process is the first that asks, and has to search for the lost ones."""
        return bool(self._store.add("search", 1) == 1)

    def find_lost(self, seconds: float, leaving: threading.Event) -> str:
        """After a failed collective: a message that names the processes without a sign of life in `seconds`, or "".

        It fails on all processes at once. One of them asks the store about all others, and these wait for what it says.
        """
        if not self.searches_first():
            deadline = time.monotonic() + seconds + 1
            while self.end() is None and time.monotonic() < deadline and not leaving.wait(0.5):
                pass
            return ""
        lost = self.without_beat(seconds)
        if not lost or leaving.is_set() or self.end() is not None:
            return ""
        return f"A process was killed, or its node is lost: {self.describe(lost)}"

    def without_beat(self, seconds: float) -> list[int]:
        """The ranks of the others that show no sign of life within `seconds`; returns as soon as all have shown one."""
        before, deadline = self._beats(), time.monotonic() + seconds
        while True:
            now = self._beats()
            silent = [rank for rank in before if now.get(rank) == before[rank]]
            if not silent or time.monotonic() > deadline:
                return silent
            time.sleep(0.2)

    def _beats(self) -> dict[int, int]:
        published = {rank: self.progress(rank) for rank in self.others}
        return {rank: progress.beat for rank, progress in published.items() if progress and not progress.has_left}

    def end(self) -> End | None:
        """Why the run ends, or None if it does not."""
        return End(*json.loads(self._store.get("end"))) if self._store.check(["end"]) else None

    def announce_end(self, text: str, *, with_stacks: bool, code: int = 1) -> End:
        """Announce why the run ends. Returns the announcement that counts: the first one, of any process."""
        announcement = json.dumps(End(self.rank, text, with_stacks, code))
        return End(*json.loads(self._store.compare_set("end", "", announcement)))

    def describe(self, ranks: list[int]) -> str:
        """What the processes are and do, for a message that names at most four of them."""
        names = []
        for rank in ranks[:MOST_NAMES]:
            if (state := self.progress(rank)) is None:
                names.append(f"rank {rank}, which has not begun to train")
            else:
                names.append(f"rank {rank} on {state.host}, which {state.activity}, after update {state.update}")
        return "; ".join(names) + (f"; and {len(ranks) - MOST_NAMES} more" if len(ranks) > MOST_NAMES else "")


class Watchdog:
    """A context manager around the training. It makes errors that pass through it known to all processes."""

    def __init__(
        self,
        accelerator: Accelerator,
        run: RunDirectory,
        stop_requests: StopRequests,
        hang_seconds: float,
        agent: tuple[int, str] | None = None,
    ) -> None:
        """The run ends after `hang_seconds` without a step, before the first update after `start_seconds` of it; 0 is
        never. `agent`: the launcher's process, see `environment.Launch`."""
        self.run, self.stop_requests, self.agent = run, stop_requests, agent
        self.start_seconds, self.hang_seconds = start_seconds(hang_seconds), hang_seconds
        self.rank: int = accelerator.process_index
        self.world_size: int = accelerator.num_processes
        self.tick = min(TICK_SECONDS, hang_seconds / 4) if hang_seconds else TICK_SECONDS
        self._count, self._activity, self._update, self._has_updated = 0, "begins", 0, False
        self._beat = 0
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._store = ProgressStore(self.rank, self.world_size)

    def __enter__(self) -> Watchdog:
        faulthandler.enable(file=2)  # for SIGABRT: it needs no lock of the interpreter
        # A time-out goes by the clock, and would end a job that was suspended. From now on the threads end a hang.
        set_collective_timeout(collective_seconds(0))
        self._publish()  # so that a process that hangs before its first tick can be named, too
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self._announce_error(error)
        self._leaving.set()
        self._thread.join(5)
        with contextlib.suppress(RuntimeError):
            self._publish(has_left=True)

    def heartbeat(self, activity: str) -> None:
        """Count a step of this process. `activity`: what it does now, such as "saves a checkpoint". Nearly free."""
        self._activity = activity
        self._count += 1

    def advance(self, update: int) -> None:
        """Count the end of an update; `update` updates of the run are done."""
        self._update, self._has_updated = update, True
        self.heartbeat("ends an update")

    def monitored(self, batches: Iterable[Batch], purpose: str) -> Iterator[Batch]:
        """The same batches, with a heartbeat before and after each is fetched. `purpose`: such as "training"."""
        self.heartbeat(f"waits for a batch for {purpose}")
        for batch in batches:
            self.heartbeat(f"works on a batch for {purpose}")
            yield batch
            self.heartbeat(f"waits for a batch for {purpose}")
        self.heartbeat(f"has come to the end of the batches for {purpose}")

    # The following methods run in the thread.

    def _watch(self) -> None:
        last_count, beat_of_count = -1, 0  # the last count, and the beat when it came
        unreachable = 0
        while not self._leaving.wait(self.tick):
            self._beat += 1
            if self.agent is not None and has_ended(*self.agent):
                # Nobody would end this process any more. The run itself is intact: save, as if the launcher had passed
                # on a signal. If its store is gone, too, the check of the others below ends what takes too long.
                self.agent = None
                self.stop_requests.ask(LAUNCHER_DEATH)
            if last_count != self._count:
                last_count, beat_of_count = self._count, self._beat
            idle = (self._beat - beat_of_count) * self.tick
            limit = self.hang_seconds if self._has_updated else self.start_seconds
            try:
                self._check_others()
                unreachable = 0
            except RuntimeError:  # the store's errors
                unreachable += 1
                if unreachable * self.tick >= SILENT_SECONDS:
                    self._end_run("Lost contact with the rendezvous store on rank 0's host.")
            if (
                self.world_size > 1
                and (name := self.stop_requests.reason) in FROM_LAUNCHER
                and idle >= TERMINATION_SECONDS
            ):
                # This is how a launcher ends the others when a process has died, and SIGKILL may follow before this
                # process knows of the death.
                self.run.fail(
                    f"{name} came, and no step ended within {idle:.0f} s. Has another process died? See the log."
                )
            if limit and idle >= limit:
                self._end_run(f"No progress for {idle:.0f} s (--hang-timeout-seconds).")

    def _publish(self, *, has_left: bool = False) -> None:
        if self.world_size == 1:
            return  # nobody would read it
        self._store.publish(Progress(self._beat, self._count, self._update, self._activity, hostname(), has_left))

    def _check_others(self) -> None:
        """Publish the progress of this process, and check the others': all from the main process, else the main one."""
        self._publish()
        end = self._store.end()
        if end is not None and end.rank != self.rank:
            self._follow(end)
        if silent := self._store.silent(self._beat, SILENT_SECONDS / self.tick):
            self._end_run(f"Not heard from for {SILENT_SECONDS:.0f} s: {self._store.describe(silent)}.")

    def _end_run(self, text: str) -> NoReturn:
        """End the run: all processes write their stacks, and the first that ends the run prints the message."""
        try:
            end = self._store.announce_end(text, with_stacks=True)
            if end.rank != self.rank:
                self._follow(end)
            self._write_stacks(text)
            text += self._name_slowest()
        except RuntimeError:
            self._write_stacks(text)
        self.run.fail(text)
        text += f" The stacks of all threads are in {self.run.path / 'hang'}."
        print_line(f"accel-train: error: {text}", sys.__stderr__)
        with contextlib.suppress(RuntimeError):
            self._publish(has_left=True)
        self._leave()

    def _follow(self, end: End) -> NoReturn:
        """End this process because another one ends the run.

        If the other has failed, this process gets time to notice the consequence and end by an error of its own.
        """
        if end.with_stacks:
            self._write_stacks(end.text)
            deadline = time.monotonic() + 2 * STACKS_SECONDS
            with contextlib.suppress(RuntimeError):
                while (first := self._store.progress(end.rank)) and not first.has_left and time.monotonic() < deadline:
                    self._beat += 1  # this process lives, and has written its stacks
                    self._publish()
                    time.sleep(0.5)
        else:
            self._leaving.wait(LEAVE_SECONDS)
            if self._leaving.is_set():
                sys.exit()  # of this thread only
        self._leave()

    def _name_slowest(self) -> str:
        """A sentence that names the slow process, once all have had the time to write their stacks."""
        if self.world_size == 1:
            return f" It {self._activity}, after update {self._update}."
        if silent := self._store.without_beat(STACKS_SECONDS):
            return f" The slow one: {self._store.describe(silent)}; no answer (stopped, killed, or its node is lost)."
        slow = self._store.slowest(self._count)
        if len(slow) == self.world_size:
            return f" All processes stopped at the same step: {self._store.describe([self.rank])}."
        return f" The slow one: {self._store.describe(slow)}."

    def _write_stacks(self, text: str) -> None:
        """Write the stacks of all threads of this process into the run's folder."""
        if not self.run.lease.holds():
            return
        name = f"rank {self.rank} on {hostname()}, process {os.getpid()}: {self._activity}, after update {self._update}"
        write_stacks(self.run.path / "hang" / f"rank-{self.rank}.txt", f"{text}\n{name}")

    def _leave(self) -> NoReturn:
        """End this process at once, whatever its main thread waits for."""
        for worker in multiprocessing.active_children():  # a worker that hangs would outlive this process
            worker.kill()
        self.run.lease.release_within(RELEASE_SECONDS)
        tell_job_script(CODE, 1)
        os._exit(1)

    # The following methods run in the main thread.

    def _announce_error(self, error: BaseException) -> None:
        """Make an error known to all; raises another one if it is the consequence of an earlier error elsewhere."""
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        if self.world_size > 1 and not (isinstance(error, UserError) and error.every_process):
            text = f"rank {self.rank} on {hostname()}: {text}"
        if isinstance(error, KeyboardInterrupt):
            text = "Ctrl-C twice: stopped at once, without a checkpoint"
        first, lost, code = self.rank, "", error.code if isinstance(error, UserError) else 1
        try:
            if self.world_size > 1 and isinstance(error, RuntimeError) and self._store.end() is None:
                lost = self._store.find_lost(3 * self.tick, self._leaving)
            end = self._store.announce_end(lost or text, with_stacks=False, code=code)
            first, text, code = end.rank, end.text, end.code
        except RuntimeError:  # the store's
            if isinstance(error, RuntimeError):  # a collective's, which has failed together with it
                lost = text = f"{hostname()} has lost rank 0, which was killed, or its node: {reason_of(error, 200)}"
        if self.rank in (0, first):
            self.run.fail(text)
        if first != self.rank and isinstance(error, RuntimeError):  # of these processes only the main one prints it
            raise UserError(f"Rank {self.rank} ends with rank {first}, which says: {text}", code=code) from error
        if lost:  # nobody can correct that: the job script says how to continue
            raise UserError(lost, every_process=False, code=1) from error
