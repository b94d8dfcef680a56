"""Sends what is final of a run to its trackers, while it trains or later. A tracker that fails ends no run."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from accel_train.checkpoint.directory import list_updates
from accel_train.config.options import parse
from accel_train.config.schema import Config
from accel_train.errors import UserError, reason_of
from accel_train.ownership.generation import read_result
from accel_train.ownership.owner import has_owner
from accel_train.records import events
from accel_train.records.events import Event
from accel_train.records.trackers import check_trackers
from accel_train.records.trackers.curves import read_curves
from accel_train.records.trackers.services import Memory, Service, create_service

PAUSE_SECONDS = 5.0  # between two looks at metrics.jsonl: checkpoints may come fast, and the file may be long
END_SECONDS = 60.0  # how long a finished run waits for its trackers
STOP_SECONDS = 15.0  # how long a stopped one does: its job may be killed soon


def send_final(run: Path, service: Service) -> tuple[int, int]:
    """Send what is final and new; return how many steps are final, and how many are not yet."""
    # The checkpoints and the result first: what they make final is in the lines that are read after them.
    result, updates = read_result(run), list_updates(run / "checkpoints")
    is_finished = isinstance(result.get("updates"), int)
    points, saves = read_curves(run)
    position = (updates[-1], saves.get(updates[-1], 0)) if updates else (0, 0)
    final = [point for point in points if is_finished or point.is_final(position)]
    service.send(final)
    if is_finished:
        service.finish(result, (run / "result.json").stat().st_mtime)
    return len(final), len(points) - len(final)


class Sender(threading.Thread):
    """Does the work of one tracker in its own thread, because its server may be slow or unreachable."""

    def __init__(self, service: Service, run: Path) -> None:
        super().__init__(name=f"tracker {service.name}", daemon=True)
        self.service, self.folder = service, run
        self.failure: Exception | None = None
        self._asked, self._ending = threading.Event(), threading.Event()

    def ask(self) -> None:
        """Let it look for what is final now."""
        self._asked.set()

    def end(self) -> None:
        """Let it look once more, and end."""
        self._ending.set()
        self._asked.set()

    def run(self) -> None:
        try:
            self.service.begin()
            is_ending = False
            while not is_ending:
                self._asked.wait()
                self._asked.clear()
                is_ending = self._ending.is_set()
                send_final(self.folder, self.service)
                self._ending.wait(PAUSE_SECONDS)
            self.service.close()
        except Exception as error:
            self.failure = error


class Trackers:
    """The trackers of a run, on its main process. Its methods return at once, but for `end`."""

    def __init__(self, config: Config, run: Path) -> None:
        self.config, self.run = config, run
        self._senders: list[Sender] = []
        self._warned: set[str] = set()

    def handle(self, event: Event) -> Sequence[str]:
        """Send what an event has made final; return warnings."""
        match event:
            case events.UpdateDone():
                return self.warnings()
            case events.Started():
                self.begin(resumed=event.resumed)
            case events.SaveCommitted():
                self.ask()
            case events.Ended() if event.result is not None:
                return self.end(END_SECONDS)
            case events.Closed():
                return self.end(STOP_SECONDS)
        return ()

    def begin(self, *, resumed: bool) -> None:
        """Start the trackers."""
        for name in dict.fromkeys(self.config.trackers):
            if not resumed:
                Memory(self.run, name).forget()  # a new run in the directory of an old one
            sender = Sender(create_service(name, self.config, self.run), self.run)
            sender.ask()
            sender.start()
            self._senders.append(sender)

    def ask(self) -> None:
        for sender in self._senders:
            sender.ask()

    def warnings(self) -> list[str]:
        """A warning for each tracker that has failed since the last call."""
        failed = {s.service.name: s.failure for s in self._senders if s.failure and s.service.name not in self._warned}
        self._warned |= failed.keys()
        return [
            f"the tracker {name} has failed: {reason_of(error)}. The training goes on without it; "
            f"`accel-train track {shlex.quote(str(self.run))} --to {name}` sends its curves later."
            for name, error in failed.items()
        ]

    def end(self, seconds: float) -> list[str]:
        """End the trackers within this time. Returns warnings."""
        deadline = time.monotonic() + seconds
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


def track(run: Path, name: str) -> str:
    """Send what is new of the run in the folder `run` to the tracker `name`. Returns how much that was, in words.

    Raises UserError if the run, while it trains, sends to this tracker itself, or if the tracker fails.
    """
    from accelerate import PartialState

    config = parse([str(run / "config.yaml")], checks_code=False)
    check_trackers([name], "--to")
    if name in config.trackers and has_owner(run):
        raise UserError(f"{run} is training, and sends its curves to {name} itself.")
    PartialState(cpu=True)  # Accelerate's trackers ask it which process they are on
    try:
        with FileLock(run / ".trackers.lock", timeout=0):
            final, rest = _send_once(run, create_service(name, config, run))
    except Timeout:
        raise UserError(f"Another process is sending the curves of {run}; try again later.") from None
    except OSError as error:
        raise UserError(f"{run}: cannot be read or written ({error.strerror}).") from error
    waits = f"; {rest} newer steps can be sent after the next checkpoint" if rest else ""
    return f"{name}: sent the curves of {run}, {final} steps{waits}"


def _send_once(run: Path, service: Service) -> tuple[int, int]:
    try:
        service.begin()
        counts = send_final(run, service)
        service.close()
    except Exception as error:  # of the tracker's package
        raise UserError(f"{service.name}: {reason_of(error)}. Start it again to send the rest.", code=1) from error
    return counts
