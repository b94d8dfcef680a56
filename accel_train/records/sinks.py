"""Delivers what happens in a training to those who write or show it, its sinks; two of them are here.

A sink has one method, `handle`. It uses no collective, and knows no other sink: it may rely only on the order, in which
metrics.jsonl is the first. docs/architecture.md lists all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from accel_train.errors import counted
from accel_train.records import events
from accel_train.records.directory import DAMAGED, RunDirectory
from accel_train.records.events import Event


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
            line |= event.figures
        case events.Evaluated():
            line = {"kind": "eval", "split": event.split, "weights": event.weights, "epoch": event.epoch}
            line |= {"update": event.update, **event.figures, "count": event.count, "seconds": event.seconds}
        case events.SaveBegun():
            line = {"kind": "checkpoint", "epoch": event.epoch, "update": event.update}
            line |= {"stalled_seconds": event.stalled_seconds, "seconds": event.seconds}
        case events.Skipped():
            line = {"kind": "event", "text": f"not finite: {event.reason}"}
            line |= {"update": event.update, "action": event.action}
        case events.Rewound():
            line = {"kind": "event", "text": "rewound", "update": event.update}
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
        damaged = 0
        match event:
            case events.Started():
                # Also at update 0: a run that was killed before its first checkpoint has left lines.
                damaged = self._directory.rewind(event.update, event.evaluated, tests_again=event.trained)
                # The start before this one may have been killed between the save and its line.
                is_own = event.resumed and event.checkpoint == event.update
                if is_own and not self._directory.has_checkpoint_line(event.update):
                    unknown = {"stalled_seconds": None, "seconds": None}
                    self._directory.log("checkpoint", epoch=event.epoch, update=event.update, **unknown)
            case events.Rewound():
                self._directory.rewind(event.update, event.evaluated)
        if (line := line_of(event)) is not None:
            self._directory.log(**line)
        return [f"metrics.jsonl: {counted(damaged, 'damaged line')} moved to {DAMAGED}"] if damaged else []


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
                    update=event.update,
                    updates=event.updates,
                    left_out_updates=event.skipped_updates,
                    last_checkpoint=event.checkpoint,
                )
            case events.Logged():
                values = {"eta_seconds": event.eta_seconds, **event.figures}
                self._write("training", epoch=event.epoch, update=event.update, **values)
            case events.SaveBegun():
                self._write("training", failed_checkpoints=event.failures)
            case events.SaveCommitted() | events.Rewound():
                self._write("training", last_checkpoint=event.update)
            case events.Skipped():
                self._write("training", force=True, left_out_updates=event.skipped_updates)
            case events.Ended():
                self._write(event.state, force=True, update=event.update, **event.status)
        return ()
