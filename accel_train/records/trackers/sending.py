"""Sends a run's curves to its trackers while it trains. A tracker that fails or hangs costs the run nothing."""

from __future__ import annotations

import queue
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_train.config.schema import Config
from accel_train.errors import reason_of
from accel_train.records import events
from accel_train.records.directory import plain
from accel_train.records.events import Event
from accel_train.records.sinks import line_of
from accel_train.records.trackers.curves import Point, add_point, point_of, read_curves, saves_in
from accel_train.records.trackers.services import Memory, Service, create_service

END_SECONDS = 60.0  # how long a finished run waits for its trackers
STOP_SECONDS = 15.0  # how long a stopped one does: its job may be killed soon


class Sender(threading.Thread):
    """Does the work of one tracker in its own thread, because its server may be slow or unreachable."""

    def __init__(self, service: Service) -> None:
        super().__init__(name=f"tracker {service.name}", daemon=True)
        self.service = service
        self.failure: Exception | None = None
        self._tasks: queue.SimpleQueue[Callable[[Service], None] | None] = queue.SimpleQueue()

    def do(self, task: Callable[[Service], None]) -> None:
        if self.failure is None:
            self._tasks.put(task)

    def end(self) -> None:
        self._tasks.put(None)

    def run(self) -> None:
        try:
            while (task := self._tasks.get()) is not None:
                task(self.service)
            self.service.close()
        except Exception as error:
            self.failure = error


class Trackers:
    """The trackers of a run, on its main process. Its methods return at once, but for `end`."""

    def __init__(self, config: Config, run: Path) -> None:
        self.config, self.run = config, run
        self._senders: list[Sender] = []
        self._warned: set[str] = set()
        self._pending: dict[int, Point] = {}  # not final yet
        self._saves: dict[int, int] = {}  # the checkpoints that have begun: update -> the epoch that goes on after it
        self._settled: int | None = None

    def handle(self, event: Event) -> Sequence[str]:
        """Send what an event says; return warnings."""
        match event:
            case events.UpdateDone():
                return self.warnings()
            case events.Logged() | events.Evaluated() | events.SaveBegun():
                self.add(plain(line_of(event)))
            case events.SaveCommitted():
                self.settle(event.update)
            case events.Started():
                self.begin(event.update, resumed=event.resumed)
                self.settle(event.checkpoint)
            case events.Rewound():
                self.rewind(event.update)
            case events.Ended() if event.result is not None:
                return self.end(event.result)
            case events.Closed():
                return self.end()
        return ()

    def begin(self, update: int, *, resumed: bool) -> None:
        """Start the trackers of a run that goes on at `update`."""
        points = self._read()
        for name in dict.fromkeys(self.config.trackers):
            if not resumed and (memory := Memory(self.run, name)).values.get("sent") is not None:
                memory.forget()  # a new run in the directory of an old one
            sender = Sender(create_service(name, self.config, self.run))
            sender.do(lambda service: service.open(update, points))
            sender.start()
            self._senders.append(sender)

    def _read(self) -> list[Point]:
        points, self._saves = read_curves(self.run)
        self._pending = {point.step: point for point in points}
        return points

    def _do(self, task: Callable[[Service], None]) -> None:
        for sender in self._senders:
            sender.do(task)

    def add(self, line: Mapping[str, Any]) -> None:
        """Log a line of metrics.jsonl."""
        self._saves |= saves_in([line])
        if (point := point_of(line)) is not None:
            add_point(self._pending, point)
            self._do(lambda service: service.add(point))

    def settle(self, checkpoint: int | None) -> None:
        """Log what is final, if the newest complete `checkpoint` is another one than before."""
        if checkpoint is None or checkpoint == self._settled:
            return
        self._settled = checkpoint
        position = (checkpoint, self._saves.get(checkpoint, 0))
        self._settle([point for point in self._pending.values() if point.is_final(position)])

    def _settle(self, points: list[Point]) -> None:
        for point in points:
            del self._pending[point.step]
        points.sort(key=lambda point: point.step)
        self._do(lambda service: service.settle(points))

    def rewind(self, update: int) -> None:
        """Take back what came after `update`. The lines of metrics.jsonl are removed already."""
        points = self._read()
        self._do(lambda service: service.rewind(update, points))

    def warnings(self) -> list[str]:
        """A warning for each tracker that has failed since the last call."""
        failed = {s.service.name: s.failure for s in self._senders if s.failure and s.service.name not in self._warned}
        self._warned |= failed.keys()
        return [
            f"the tracker {name} has failed: {reason_of(error)}. The training goes on without it; "
            f"`accel-train track {shlex.quote(str(self.run))} --to {name}` sends its curves later."
            for name, error in failed.items()
        ]

    def end(self, result: Mapping[str, Any] | None = None) -> list[str]:
        """End the trackers, with the `result` of a finished run. Returns warnings."""
        if result is not None:
            self._settle(list(self._pending.values()))
            when = time.time()
            self._do(lambda service: service.finish(result, when))
        deadline = time.monotonic() + (STOP_SECONDS if result is None else END_SECONDS)
        for sender in self._senders:
            sender.end()
        late = []
        for sender in self._senders:
            sender.join(max(0.0, deadline - time.monotonic()))
            if sender.is_alive():
                name = sender.service.name
                late.append(
                    f"the tracker {name} is still sending; the run ends without waiting for it. "
                    f"`accel-train track {shlex.quote(str(self.run))} --to {name}` sends the rest."
                )
        warnings = [*self.warnings(), *late]
        self._senders = []
        return warnings
