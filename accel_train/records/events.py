"""What happens in a training, as the loop says it. docs/architecture.md says who is told, and in which order.

All values are the host's, and of all processes together: what needs the device or the other processes is read before an
event is made. Epochs count from 1.

They are delivered to those who write or show them, the sinks; two of these are here. A sink has one method, `handle`.
It uses no collective, and knows no other sink: it may rely only on the order, in which metrics.jsonl is the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from accel_train.records import events
from accel_train.records.directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class Event:
    """What all events have."""

    time: float = field(default_factory=lambda: round(time.time(), 3))
    """In seconds since 1970."""


@dataclass(frozen=True)
class Said(Event):
    """Lines for the user, which no file has."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Warned(Event):
    """A warning, which is an event line of metrics.jsonl, too."""

    text: str


@dataclass(frozen=True)
class Noted(Event):
    """An event line of metrics.jsonl, which the user is not shown."""

    text: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Started(Event):
    """Training begins, or goes on after `update`."""

    update: int
    updates: int
    """Of the whole run."""
    epoch: int
    epochs: float
    """Of the whole run."""
    evaluated: bool
    """Whether the evaluation after `update` is done, if there was one to do."""
    skipped_updates: int
    """Those that were not finite, in earlier starts."""
    resumed: bool
    trained: bool
    """All epochs are done, and only the test is left."""
    checkpoint: int | None
    """The update of the newest complete checkpoint."""
    directory: Path
    """Of the run."""


@dataclass(frozen=True)
class UpdateDone(Event):
    """An update is done, or skipped. With observers each one is told, else some of them: see run/run.py."""

    update: int
    epoch: int
    eta_seconds: float | None
    line_due: bool
    """Whether `Logged` follows."""
    metrics: ClassVar[None] = None


@dataclass(frozen=True)
class Logged(Event):
    """The metrics of the updates since the last such event, and "lr" (of the last update),
    "images_per_second" and "data_wait_fraction"."""

    update: int
    epoch: int
    seconds: float
    metrics: Mapping[str, float]
    eta_seconds: float | None


@dataclass(frozen=True)
class Evaluated(Event):
    """A split was evaluated; of "train" these are the metrics that were counted while the weights changed.

    At an epoch's end "train" comes first, then "val" and "val (ema)", if they are due."""

    name: str
    """The split, such as "val", or "val (ema)" if the EMA was evaluated."""
    update: int
    epoch: int
    metrics: Mapping[str, float]
    count: int
    """Samples of the split."""
    seconds: float
    """Since the evaluation before."""

    @property
    def split(self) -> str:
        return self.name.removesuffix(" (ema)")

    @property
    def weights(self) -> str:
        """ "model" or "ema"."""
        return "ema" if self.name.endswith(" (ema)") else "model"


@dataclass(frozen=True)
class SaveBegun(Event):
    """The copy of a checkpoint in host memory is complete, and goes to the disk in the background."""

    update: int
    epoch: int
    stalled_seconds: float
    """For which training stood still."""
    seconds: float
    """The duration of the last complete save: of this one only if the run has waited for it."""
    failures: int
    """Saves that have failed in this start."""


@dataclass(frozen=True)
class SaveCommitted(Event):
    """A checkpoint is complete on the disk."""

    update: int
    path: Path


@dataclass(frozen=True)
class Skipped(Event):
    """An update was not finite and is skipped."""

    update: int
    reason: str
    skipped_updates: int
    """With it, in all starts."""


@dataclass(frozen=True)
class Ended(Event):
    """The training has ended: finished, interrupted or failed. What it leaves is on the disk as far as it could be."""

    update: int
    state: str
    """ "finished", "interrupted" or "failed"."""
    title: str
    shown: Mapping[str, str]
    """What the last screen shows, by name."""
    commands: Mapping[str, str]
    """What to do next, by name."""
    status: Mapping[str, Any] = field(default_factory=dict)
    """More values of status.json."""
    result: Mapping[str, Any] | None = None
    """The content of result.json, of a run that is trained to its end."""
    stopped_by: str | None = None
    """What ended or interrupted it: "epochs", "patience", "hours", "SIGTERM", …"""


@dataclass(frozen=True)
class Closed(Event):
    """The process leaves the run, after its end or with an error: nothing follows."""


class Sink(Protocol):
    """Whoever is told what happens."""

    def handle(self, event: Event, /) -> Sequence[str]:
        """Take an event; return what the user must be warned of."""


class Stream:
    """Tells each sink, in their order, before the next event comes. Only the main process has sinks."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = sinks

    def emit(self, event: Event) -> None:
        """Deliver `event`, and then as events of their own the warnings that it has caused."""
        warnings = [text for sink in self.sinks for text in sink.handle(event)]
        for text in warnings:
            self.emit(events.Warned(text))


def line_of(event: Event) -> dict[str, Any] | None:
    """What metrics.jsonl has of an event, and trackers send; None if it has no line."""
    match event:
        case events.Logged():
            line = {"kind": "train", "epoch": event.epoch, "update": event.update, "seconds": event.seconds}
            line |= event.metrics
        case events.Evaluated():
            line = {"kind": "eval", "split": event.split, "weights": event.weights, "epoch": event.epoch}
            line |= {"update": event.update, **event.metrics, "count": event.count, "seconds": event.seconds}
        case events.SaveBegun():
            line = {"kind": "checkpoint", "epoch": event.epoch, "update": event.update}
            line |= {"stalled_seconds": event.stalled_seconds, "seconds": event.seconds}
        case events.Skipped():
            line = {"kind": "event", "text": f"not finite: {event.reason}"}
            line |= {"update": event.update, "action": "skip"}
        case events.Noted():
            line = {"kind": "event", "text": event.text, **event.values}
        case events.Warned():
            line = {"kind": "event", "text": event.text}
        case _:
            return None
    return {**line, "time": event.time}


class MetricsLines:
    """metrics.jsonl: a line for each event that has one; the lines of what will be done again are removed."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def handle(self, event: Event) -> Sequence[str]:
        match event:
            case events.Started():
                # Also at update 0: a run that was killed before its first checkpoint has left lines.
                self._directory.remove_lines_after(event.update, event.evaluated, tests_again=event.trained)
        if (line := line_of(event)) is not None:
            self._directory.log(**line)
        return ()


class Status:
    """status.json: where the run is."""

    def __init__(self, directory: RunDirectory) -> None:
        self._write: Callable[..., None] = directory.status

    def handle(self, event: Event) -> Sequence[str]:
        match event:
            case events.UpdateDone():
                self._write("training", update=event.update, eta_seconds=event.eta_seconds)
            case events.Started():
                self._write(
                    "training",
                    force=True,
                    epoch=event.epoch,
                    epochs=event.epochs,
                    update=event.update,
                    updates=event.updates,
                    skipped_updates=event.skipped_updates,
                    last_checkpoint=event.checkpoint,
                )
            case events.Logged():
                values = {"eta_seconds": event.eta_seconds, **event.metrics}
                self._write("training", epoch=event.epoch, update=event.update, **values)
            case events.Evaluated() if event.split == "val":
                names = event.metrics.keys() & {"accuracy", "map"}  # `accel-train runs` shows them
                self._write("training", **{f"val_{name}": event.metrics[name] for name in names})
            case events.SaveBegun():
                self._write("training", failed_checkpoints=event.failures)
            case events.SaveCommitted():
                self._write("training", last_checkpoint=event.update)
            case events.Skipped():
                self._write("training", force=True, skipped_updates=event.skipped_updates)
            case events.Ended():
                self._write(event.state, force=True, update=event.update, **event.status)
        return ()
