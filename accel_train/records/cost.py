"""What a run cost: where its time went, over all starts. RUN/starts.json has an entry for each start.

The main process always is in one phase, so the phases of a start add up to its time. The file is rewritten at most
every two seconds, after an update and where a phase begins. The next start begins at a checkpoint: the updates after it
have to be done again, and their share of the time moves from its phase to "repeated".
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from accel_train.files import is_count, is_number, read_json_object
from accel_train.launch.environment import Launch
from accel_train.records.directory import STATUS_SECONDS, RunDirectory
from accel_train.records.events import Event, UpdateDone

Phase = Literal["starting", "training", "evaluating", "saving"]

FILE = "starts.json"


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

    def go_back(self, update: int) -> None:
        """Count the updates after `update` as done twice: their share of the training and evaluation."""
        kept = max(update, self.first_update)
        if self.last_update <= kept:
            return
        share = (self.last_update - kept) / (self.last_update - self.first_update)
        self.repeated += share * (self.training + self.evaluating)
        self.training *= 1 - share
        self.evaluating *= 1 - share
        self.last_update = kept


class Ledger:
    """The entry of this start, and those of the starts before it. Only the main process writes."""

    def __init__(self, directory: RunDirectory, *, launch: Launch, on_cpu: bool, update: int) -> None:
        """`update`: after which this start goes on. What earlier starts did after it is counted as done twice."""
        self._directory = directory
        self.starts = read_starts(directory.path) if directory.writes else []
        unfinished = [earlier.last_update for earlier in self.starts if not earlier.finished]
        self.repeated_updates = max([update, *unfinished]) - update
        """Updates that this start does again: at least, for a start that was killed wrote the file up to 2 s before."""
        for earlier in self.starts:
            if not earlier.finished:
                earlier.go_back(update)
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

    def handle(self, event: Event) -> Sequence[str]:
        """Count an update. Phases begin and end by calls: an error ends them, too."""
        match event:
            case UpdateDone():
                if self._phase == "starting":
                    self.enter("training")
                self.start.last_update = event.update
                self.write()
        return ()

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
    except TypeError:
        return None
    counts = (start.processes, start.accelerators, start.first_update, start.last_update)
    times = (start.began, start.ended, start.starting, start.training, start.evaluating, start.saving, start.repeated)
    return start if all(map(is_count, counts)) and all(map(is_number, times)) else None


PHASES = {
    "training": "training", "evaluating": "evaluating", "saving": "saving", "starting": "starting",
    "repeated": "done twice",
}  # fmt: skip
"""The phases of a start, and what the last screen calls them."""


def cost_of(starts: Sequence[Start]) -> dict[str, Any]:
    """What the run cost, as result.json has it, mostly seconds; {} without a start.

    The wall time is that of all starts and of the time between them, in which the job was waiting to go on; not the
    time between a finished run and its continuation.
    """
    if not starts:
        return {}
    between = sum(max(0.0, later.began - each.ended) for each, later in pairwise(starts) if not each.finished)
    seconds = {phase: sum(getattr(start, phase) for start in starts) for phase in PHASES}
    spans = [max(0.0, start.ended - start.began) for start in starts]
    wall = sum(spans) + between
    accelerators = sum(start.accelerators * span for start, span in zip(starts, spans, strict=True))
    return {
        "starts": len(starts),
        "wall_seconds": wall,
        **{f"{phase}_seconds": value for phase, value in seconds.items()},
        "between_seconds": between,
        "accelerator_hours": accelerators / 3600 if accelerators else None,
    }


def cost_text(cost: dict[str, Any]) -> str:
    """One line for the last screen and the report: the wall time, and its parts of one percent and more."""
    wall, names = cost["wall_seconds"], {**PHASES, "between": "between starts"}
    parts = [f"{share:.0%} {name}" for key, name in names.items() if (share := cost[f"{key}_seconds"] / wall) >= 0.005]
    starts = f" in {cost['starts']} starts" if cost["starts"] > 1 else ""
    return f"{duration(wall)}{starts}: {', '.join(parts)}"


def duration(seconds: float) -> str:
    """A time in words: "2 h 05 min", "3 min 10 s" or "4.2 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
