"""Where the time of a run went: RUN/starts.json, with an entry for each start.

The main process always is in one phase, so the phases of a start add up to its time. The file is rewritten every
two seconds, so a killed start is recorded up to at most two seconds before. The next start begins at a checkpoint: what
came after that in earlier starts has to be done again, and moves from its phase to "repeated".
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from accel_train.launch.environment import Launch
from accel_train.records.directory import STATUS_SECONDS, RunDirectory
from accel_train.untrusted import is_count, is_number, read_json_object

Item = TypeVar("Item")
Phase = Literal["starting", "training", "evaluating", "saving"]

FILE = "starts.json"
KEPT_SAVES = 100  # of this start: older checkpoints are deleted
KEPT_SAVES_BEFORE = 10  # of each start before it: the file is written anew every two seconds


@dataclass
class Start:
    """One start of the program. Times are seconds since 1970, of the main process's host."""

    began: float
    ended: float
    """When the entry was written last."""
    processes: int
    accelerators: int
    """Of them on a GPU or another accelerator."""
    first_update: int
    """Updates done when it began."""
    last_update: int
    finished: bool = False
    """Whether the run was finished then: what follows is no interruption."""
    starting: float = 0.0
    """Seconds from the start of the program to the end of the first update."""
    training: float = 0.0
    evaluating: float = 0.0
    saving: float = 0.0
    """Seconds for which training stood still for a save."""
    repeated: float = 0.0
    """Seconds of training and evaluation whose result was lost, and which were done again."""
    waiting: float = 0.0
    """Seconds of the training that were spent waiting for data."""
    saves: list[tuple[int, float, float, float]] = field(default_factory=list)
    """At each save: the update, and the seconds of training, evaluating and waiting until then."""
    usage: dict[str, float | None] = field(default_factory=dict)
    """What the processes and their devices used until the last end of an epoch: see usage.py."""

    def go_back(self, update: int) -> None:
        """Count what was done after the save of `update`, or of an earlier one, as done twice."""
        before = [save for save in self.saves if save[0] <= update]
        kept = before[-1] if before else (self.first_update, 0.0, 0.0, 0.0)
        lost = (max(0.0, self.training - kept[1]), max(0.0, self.evaluating - kept[2]))
        self.repeated += sum(lost)
        self.training -= lost[0]
        self.evaluating -= lost[1]
        self.waiting = min(self.waiting, kept[3])
        self.saves = before
        self.last_update = min(self.last_update, max(update, self.first_update))


class Ledger:
    """The entry of this start, and those of the starts before it. Only the main process writes."""

    def __init__(
        self, directory: RunDirectory, *, launch: Launch, on_cpu: bool, update: int, anew: bool = False
    ) -> None:
        """`update`: after which this start goes on. What earlier starts did after it is counted as done twice.

        `anew`: earlier starts in this folder were another run's.
        """
        self._directory = directory
        self.starts = read_starts(directory.path) if directory.writes and not anew else []
        for earlier in self.starts:
            if earlier.last_update >= update and not earlier.finished:  # also of a test that was not finished
                earlier.go_back(update)
            earlier.saves = earlier.saves[-KEPT_SAVES_BEFORE:]
        now, processes = time.time(), launch.world_size
        self.start = Start(launch.began, now, processes, 0 if on_cpu else processes, update, update)
        self.starts.append(self.start)
        self.start.starting = max(0.0, now - launch.began)  # the imports, above all
        self._phase: Phase = "starting"
        self._since = time.monotonic()
        self._written = -math.inf
        self.write()

    def enter(self, phase: Phase) -> None:
        """Begin a phase; the one before ends."""
        now = time.monotonic()
        setattr(self.start, self._phase, getattr(self.start, self._phase) + now - self._since)
        self._phase, self._since = phase, now

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Surround a phase that is not the training: then the phase before goes on."""
        before = self._phase
        self.enter(phase)
        self.write()
        try:
            yield
        finally:
            self.enter(before)

    def updated(self, update: int, waiting: float) -> None:
        """An update is done. `waiting`: seconds that training has waited for data in this start."""
        if self._phase == "starting":
            self.enter("training")
        self.start.last_update, self.start.waiting = update, waiting
        self.write()

    def ticking(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the same items, and write the entry in between."""
        for item in items:
            self.write()
            yield item

    def saved(self, update: int) -> None:
        """A save of `update` begins: what was done until now is not lost, if it succeeds."""
        self.enter(self._phase)
        start = self.start
        start.saves = [*start.saves, (update, start.training, start.evaluating, start.waiting)][-KEPT_SAVES:]

    def rewound(self, update: int) -> None:
        """The run goes back to the checkpoint of `update`."""
        self.enter("starting")
        for start in self.starts:
            if start.last_update > update:
                start.go_back(update)

    def end(self, *, finished: bool) -> None:
        """Write the last entry."""
        self.start.finished = finished
        self.write(force=True)

    def write(self, *, force: bool = False) -> None:
        """Write the file, if it is older than two seconds or by `force`."""
        if not (self._directory.writes and (force or time.monotonic() - self._written >= STATUS_SECONDS)):
            return
        self.enter(self._phase)
        self._written, self.start.ended = time.monotonic(), time.time()
        self._directory.starts({"starts": [asdict(start) for start in self.starts]})


def read_starts(run: Path) -> list[Start]:
    """The starts of the run in a folder, from the first to the last; [] if the file is missing or damaged."""
    starts = read_json_object(run / FILE).get("starts")
    entries = starts if isinstance(starts, list) else []
    return [start for entry in entries if (start := _start(entry)) is not None]


def _start(entry: Any) -> Start | None:
    try:
        start = Start(**entry)
        start.saves = [(update, float(a), float(b), float(c)) for update, a, b, c in start.saves]
    except (TypeError, ValueError):
        return None
    counts = (start.processes, start.accelerators, start.first_update, start.last_update, *(s[0] for s in start.saves))
    times = (start.began, start.ended, start.starting, start.training, start.evaluating, start.saving, start.repeated)
    used = start.usage.values() if isinstance(start.usage, dict) else [math.nan]
    fits = all(map(is_count, counts)) and all(
        map(is_number, (*times, start.waiting, *(t for s in start.saves for t in s)))
    )
    return start if fits and all(value is None or is_number(value) for value in used) else None
