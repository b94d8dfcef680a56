"""What the watchdogs of all processes tell each other, kept in the process group's store; alone in one of its own."""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple

from torch import distributed

from accel_train.launch.compat import process_group_store
from accel_train.launch.parent import restart_count

STORE_SECONDS = 10.0  # time-out of an answer
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


class ProgressStore:
    """The watchdogs' part of the store. Its methods raise RuntimeError if the store does not answer."""

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
        before = self._beats()
        if leaving.wait(seconds) or self.end() is not None:
            return ""
        after = self._beats()
        lost = [rank for rank in before if after.get(rank) == before[rank]]
        return f"A process was killed, or its node is lost: {self.describe(lost)}" if lost else ""

    def _beats(self) -> dict[int, int]:
        published = {rank: self.progress(rank) for rank in self.others}
        return {rank: progress.beat for rank, progress in published.items() if progress and not progress.has_left}

    def end(self) -> End | None:
        """Why the run ends, or None if it does not."""
        return End(*json.loads(self._store.get("end"))) if self._store.check(["end"]) else None

    def announce_end(self, text: str, *, with_stacks: bool) -> End:
        """Announce why the run ends. Returns the announcement that counts: the first one, of any process."""
        announcement = json.dumps(End(self.rank, text, with_stacks))
        return End(*json.loads(self._store.compare_set("end", "", announcement)))

    def report_stacks(self, seconds: float) -> None:
        """Report that this process has written its stacks; wait at most `seconds` for the one that ends the run."""
        self._store.set(f"dumped/{self.rank}", "")
        self._store.wait(["ended"], timedelta(seconds=seconds))

    def wait_for_stacks(self, seconds: float) -> list[int]:
        """Wait at most `seconds` for the stacks of all others; returns the ranks that have not written theirs."""
        deadline = time.monotonic() + seconds
        while not self._store.check([f"dumped/{rank}" for rank in self.others]):
            if time.monotonic() > deadline:
                return [rank for rank in self.others if not self._store.check([f"dumped/{rank}"])]
            time.sleep(0.2)
        return []

    def finish_end(self) -> None:
        """Let the processes that wait in `report_stacks` go on."""
        self._store.set("ended", "")

    def describe(self, ranks: list[int]) -> str:
        """What the processes are and do, for a message that names at most four of them."""
        names = []
        for rank in ranks[:MOST_NAMES]:
            if (state := self.progress(rank)) is None:
                names.append(f"rank {rank}, which has not begun to train")
            else:
                names.append(f"rank {rank} on {state.host}, which {state.activity}, after update {state.update}")
        return "; ".join(names) + (f"; and {len(ranks) - MOST_NAMES} more" if len(ranks) > MOST_NAMES else "")
