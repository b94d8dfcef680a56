"""No run hangs for ever, and no process dies unnoticed: a thread in each process watches over all of them.

While one process waits for its disk, all others wait for it in a collective, and nothing says which one it is. So each
process counts what it does (a batch asked for, a batch there, an update, a checkpoint), and its thread lays count and
words into the process group's store every few seconds. Then

* a process whose count stands still for --hang-timeout-seconds (until the first update: --start-timeout-seconds, for
  downloads and compilation take long) ends the run. All processes write the stacks of all
  their threads to RUN/hang/rank-K.txt, and the slow one is named: it does not answer at all, or has counted least;
* a process that has not been heard of for 45 s was killed, or its node is lost: the others end;
* a process that fails says why, before it leaves. The others then end for that reason, not for "connection closed".

The main process's thread looks at all others, theirs only at the main one's: the store is asked little. Time is counted
in the thread's own ticks, so that a job that a cluster suspends and wakes again is none that hangs. A clock would go
on: so collectives have no time-out of their own during the training, and `monitor` watches over the thread itself.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from accelerate import Accelerator
from torch import distributed

from accel_train.errors import UserError, print_line
from accel_train.launch.process import hostname, is_gone
from accel_train.launch.rendezvous import collective_seconds, set_collective_timeout
from accel_train.records.directory import RunDirectory
from accel_train.run.monitor import Monitor
from accel_train.run.stacks import Stacks
from accel_train.run.stopping import Stopping

Batch = TypeVar("Batch")


TICK_SECONDS = 2.0


SILENT_SECONDS = 45.0  # not heard of for so long: dead. One that holds Python's lock for long is not.


TERMINATION_SECONDS = 20.0  # launchers send SIGKILL 30 s after SIGTERM


DUMP_SECONDS = 10.0  # for the others to write their stacks


RELEASE_SECONDS = 5.0  # for the file system to take a deletion


LEAVE_SECONDS = 20.0  # for a process to end by itself, once it is known that all have to


class Watchdog:
    """A context manager around the training; the errors that pass through it are made known to all processes."""

    def __init__(
        self,
        accelerator: Accelerator,
        run: RunDirectory,
        stopping: Stopping,
        start_seconds: float,
        hang_seconds: float,
        agent: tuple[int, str] | None = None,
    ) -> None:
        """How long nothing may happen: `start_seconds` until the first update, then `hang_seconds`; 0 is never.

        `agent`: the launcher's process, see `launch.Launch`."""
        self.run, self.stopping, self.start_seconds, self.hang_seconds = run, stopping, start_seconds, hang_seconds
        self.agent = agent
        self.rank: int = accelerator.process_index
        self.world_size: int = accelerator.num_processes
        self.tick = min([TICK_SECONDS, *(limit / 4 for limit in (start_seconds, hang_seconds) if limit)])
        self._count, self._doing, self._update, self._advanced = 0, "begins", 0, False
        self._beat = 0
        self._heard: dict[int, tuple[int, int]] = {}  # rank: its last beat, and ours when it came
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._store: Any = None

    def __enter__(self) -> Watchdog:
        if self.world_size > 1:
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            # A connection of its own: on the group's, a collective's set-up may hold the lock for long.
            store = distributed.distributed_c10d._get_default_store().clone()
            self._store = distributed.distributed_c10d.PrefixStore(f"accel_train/watchdog/{attempt}", store)
            self._store.set_timeout(timedelta(seconds=10))
            # It goes by the clock, and would end a job that was suspended. From now on the threads end what hangs.
            set_collective_timeout(collective_seconds(0))
            self._publish()  # so that one that hangs before its thread's first tick has a name, too
        self._stacks, self._monitor = Stacks(), Monitor()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._failed(error)
        self._leaving.set()
        self._thread.join(5)
        self._monitor.close()
        with contextlib.suppress(RuntimeError):
            self._publish(left=True)

    def note(self, doing: str) -> None:
        """This process has come one step further, and now does what `doing` says. Costs next to nothing."""
        self._doing = doing
        self._count += 1

    def advance(self, update: int) -> None:
        """`update` updates of the run are done."""
        self._update, self._advanced = update, True
        self.note("ends an update")

    def watched(self, batches: Iterable[Batch], doing: str) -> Iterator[Batch]:
        """The same batches; waiting for each, and working on it, is noted. `doing`: what for, such as "training"."""
        iterator = iter(batches)
        while True:
            self.note(f"waits for a batch for {doing}")
            try:
                batch = next(iterator)
            except StopIteration:
                self.note(f"has come to the end of the batches for {doing}")
                return
            self.note(f"works on a batch for {doing}")
            yield batch

    # What follows runs in the thread.

    def _watch(self) -> None:
        seen = (-1, 0)  # the last count, and the beat when it came
        unreachable = 0
        while not self._leaving.wait(self.tick):
            self._beat += 1
            if self.agent is not None and is_gone(*self.agent):
                # Nobody would end us any more. Nothing of the run is broken: save, as if the launcher had handed on
                # a signal. Where its store is gone too, the look at the others below ends what takes too long.
                self.agent = None
                self.stopping.reason = self.stopping.reason or "the launcher's death"
            if seen[0] != self._count:
                seen = (self._count, self._beat)
            idle = (self._beat - seen[1]) * self.tick
            limit, option = (
                (self.hang_seconds, "--hang-timeout-seconds")
                if self._advanced
                else (self.start_seconds, "--start-timeout-seconds")
            )
            self._monitor.expect(limit + 60 if limit else 0)
            try:
                self._look()
                unreachable = 0
            except RuntimeError:  # the store's errors
                unreachable += 1
                if unreachable * self.tick >= SILENT_SECONDS:
                    self._end("The process or launcher that holds the store, on rank 0's host, does not answer.")
            if self.world_size > 1 and self.stopping.reason == "SIGTERM" and idle >= TERMINATION_SECONDS:
                # So a launcher ends the others of a process that died, and we may be killed before we know of it.
                self.run.fail(f"SIGTERM came, and no step ended in {idle:.0f} s: has another process died? See the log")
            if limit and idle >= limit:
                self._end(f"No progress for {idle:.0f} s ({option}).")

    def _publish(self, *, left: bool = False) -> None:
        if self._store is not None:
            state = [self._beat, self._count, self._update, self._doing, hostname(), left]
            self._store.set(f"rank/{self.rank}", json.dumps(state))

    def _look(self) -> None:
        """Tell the others, and look at them: at all from the main process, else at the main process."""
        if self._store is None:
            return
        self._publish()
        if self._store.check(["end"]):
            reason = json.loads(self._store.get("end"))
            if reason["rank"] != self.rank:
                self._follow(reason)
        silent = [rank for rank in (range(1, self.world_size) if self.rank == 0 else [0]) if self._is_silent(rank)]
        if silent:
            self._end(f"Not heard of for {SILENT_SECONDS:.0f} s: {self._names(silent)}.")

    def _is_silent(self, rank: int) -> bool:
        if not self._store.check([f"rank/{rank}"]):
            return False  # it has not begun
        beat, *_, left = json.loads(self._store.get(f"rank/{rank}"))
        if left or rank not in self._heard or self._heard[rank][0] != beat:
            self._heard[rank] = (beat, self._beat)
        return not left and (self._beat - self._heard[rank][1]) * self.tick >= SILENT_SECONDS

    def _end(self, text: str) -> NoReturn:
        """End the run: all processes write their stacks, one of them speaks."""
        try:
            if self._claim(text, dump=True) != self.rank:
                self._follow(json.loads(self._store.get("end")))
            self._dump(text)
            text += self._slow()
        except RuntimeError:
            self._dump(text)
        self.run.fail(text)
        text += f" The stacks of all threads are in {self.run.path / 'hang'}."
        print_line(f"accel-train: error: {text}", sys.__stderr__)
        with contextlib.suppress(RuntimeError):
            self._publish_ended()
        self._leave()

    def _follow(self, reason: dict[str, Any]) -> NoReturn:
        """Another process ends the run. One that failed gives us time to find that out, too, and to end by it."""
        if reason["dump"]:
            self._dump(reason["text"])
            with contextlib.suppress(RuntimeError):
                self._store.set(f"dumped/{self.rank}", "")
                self._store.wait(["ended"], timedelta(seconds=2 * DUMP_SECONDS))
        else:
            self._leaving.wait(LEAVE_SECONDS)
            if self._leaving.is_set():
                sys.exit()  # of this thread only
        self._leave()

    def _claim(self, text: str, *, dump: bool) -> int:
        """Say why the run ends, if nobody has yet; returns the rank whose reason counts."""
        if self._store is None:
            return self.rank
        reason = json.dumps({"rank": self.rank, "text": text, "dump": dump})
        return int(json.loads(self._store.compare_set("end", "", reason))["rank"])

    def _publish_ended(self) -> None:
        if self._store is not None:
            self._store.set("ended", "")

    def _slow(self) -> str:
        """Once all have had the time to write their stacks: which process is the slow one, in words."""
        if self._store is None:
            return f" It {self._doing}, after update {self._update}."
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        deadline = time.monotonic() + DUMP_SECONDS
        while not (all_there := self._store.check([f"dumped/{rank}" for rank in others])):
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        if not all_there:
            mute = [rank for rank in others if not self._store.check([f"dumped/{rank}"])]
            return f" The slow one: {self._names(mute)}; no answer (stopped, killed, or its node is lost)."
        counts = {rank: json.loads(self._store.get(f"rank/{rank}"))[1] for rank in others} | {self.rank: self._count}
        slow = [rank for rank, count in counts.items() if count == min(counts.values())]
        if len(slow) == self.world_size:
            return f" All processes stand at the same place: {self._names([self.rank])}."
        return f" The slow one: {self._names(slow)}."

    def _names(self, ranks: list[int]) -> str:
        names = []
        for rank in ranks[:4]:
            if not self._store.check([f"rank/{rank}"]):
                names.append(f"rank {rank}, which has not begun to train")
                continue
            _, _, update, doing, host, _ = json.loads(self._store.get(f"rank/{rank}"))
            names.append(f"rank {rank} on {host}, which {doing}, after update {update}")
        return "; ".join(names) + (f"; and {len(ranks) - 4} more" if len(ranks) > 4 else "")

    def _dump(self, text: str) -> None:
        """The stacks of all threads of this process and of its data workers, into the run's folder."""
        if not self.run.lease.holds(fresh=True):
            return
        who = f"rank {self.rank} on {hostname()}, process {os.getpid()}: {self._doing}, after update {self._update}"
        self._stacks.write(self.run.path / "hang" / f"rank-{self.rank}.txt", f"{text}\n{who}")

    def _leave(self) -> NoReturn:
        """End this process at once, whatever its main thread waits for. A worker that is stuck would outlive it."""
        for worker in multiprocessing.active_children():
            worker.kill()
        self.run.lease.release_within(RELEASE_SECONDS)
        os._exit(1)

    # And this in the main thread.

    def _failed(self, error: BaseException) -> None:
        """Make an error known; raises another one if it is the consequence of an earlier one elsewhere."""
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        text = text if self.world_size == 1 or _everywhere(error) else f"rank {self.rank} on {hostname()}: {text}"
        if isinstance(error, KeyboardInterrupt):
            text = "Ctrl-C twice: stopped at once, without a checkpoint"
        first, gone = self.rank, ""
        with contextlib.suppress(RuntimeError):
            if self._store is not None and isinstance(error, RuntimeError) and not self._store.check(["end"]):
                gone = self._gone()
            first = self._claim(gone or text, dump=False)
            text = gone or text if first == self.rank else json.loads(self._store.get("end"))["text"]
        if self.rank in (0, first):
            self.run.fail(text)
        if first != self.rank and isinstance(error, RuntimeError):  # of all of these only the main process speaks
            raise UserError(f"Rank {self.rank} ends with rank {first}, which says: {text}") from error
        if gone:
            raise UserError(gone, every_process=False) from error

    def _gone(self) -> str:
        """After a failed collective: who is not heard of any more, in words, or ""."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]

        def beats() -> dict[int, int]:
            states = {rank: json.loads(self._store.get(f"rank/{rank}")) for rank in others}
            return {rank: state[0] for rank, state in states.items() if not state[-1]}

        before = beats()
        if self._leaving.wait(3 * self.tick) or self._store.check(["end"]):
            return ""
        after = beats()
        gone = [rank for rank in before if after.get(rank) == before[rank]]
        return f"A process was killed, or its node is lost: {self._names(gone)}" if gone else ""


def _everywhere(error: BaseException) -> bool:
    return isinstance(error, UserError) and error.every_process
