"""What a run prints: a plain line for each log interval. On a terminal, terminal.py shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta

from accel_train.errors import LOGGER
from accel_train.records.events import (
    Ended,
    Evaluated,
    Event,
    Logged,
    Said,
    Skipped,
    UpdateDone,
    Warned,
)
from accel_train.records.meter import Pace
from accel_train.records.metrics import headlines
from accel_train.task import Metric


class Console:
    """The output of one run as lines of the logger; a context manager. That of the main process alone gets events."""

    def __init__(
        self,
        *,
        total_updates: int,
        updates_per_epoch: int,
        epochs: float,
        metrics: Sequence[Metric],
        first_update: int = 0,
    ) -> None:
        """`first_update`: updates done by earlier starts of the run. `metrics`: of which the headlines are shown."""
        self.metrics = metrics
        self.pace = Pace(total_updates, first_update)
        self.updates_per_epoch = updates_per_epoch
        self.epochs = epochs

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def handle(self, event: Event) -> Sequence[str]:
        """Show an event."""
        match event:
            case UpdateDone():
                self.advance(event.update)
            case Logged():
                self.show_training(event.update, event.epoch, event.metrics)
            case Evaluated():
                self.show_evaluation(event.name, event.epoch, event.metrics, event.seconds)
            case Said():
                self.say(*event.lines)
            case Warned():
                self.warn(event.text)
            case Skipped():
                self.warn(f"update {event.update} is not finite: {event.reason}; it is skipped")
            case Ended():
                self.finish(event.title, event.shown, event.commands)
        return ()

    def advance(self, update: int) -> None:
        """Store that `update` updates of the run are done."""
        self.pace.update = update

    def show_training(self, update: int, epoch: int, values: Mapping[str, float]) -> None:
        """Show the training's metrics, and its "images_per_second", "lr" and "data_wait_fraction" (0 to 1).

        `epoch` counts from 1.
        """
        position = f"{self.epoch_text(epoch)}  update {format_progress(update, self.pace.total_updates)}"
        shown = line_of(self.training_metrics(values))
        LOGGER.info(f"{position}  {shown}  eta {clock(self.pace.eta_seconds)}")

    def training_metrics(self, values: Mapping[str, float]) -> dict[str, str]:
        """Return what is shown of the training's metrics, by name."""
        return {
            **headlines(values, self.metrics),
            "images/s": f"{values['images_per_second']:.0f}",
            "lr": f"{values['lr']:.4g}",
            "data wait": f"{values['data_wait_fraction']:.0%}",
        }

    def show_evaluation(self, split: str, epoch: int, values: Mapping[str, float], seconds: float) -> None:
        """Show the metrics of an evaluation at the end of `epoch`, which counts from 1."""
        # As wide as "100.00%", or as "0.0123".
        shown = {
            name: f"{value:>{7 if value.endswith('%') else 6}}"
            for name, value in headlines(values, self.metrics).items()
        }
        self.say(f"{self.epoch_text(epoch)}  {split:<5}  {line_of(shown)}  ({seconds:.1f} s)")

    def say(self, *lines: str) -> None:
        """Print lines."""
        for line in lines:
            LOGGER.info(line)

    def warn(self, text: str) -> None:
        """Print a warning."""
        LOGGER.warning(text)

    def finish(self, title: str, shown: Mapping[str, str], commands: Mapping[str, str]) -> None:
        """Print how the run has ended.

        `shown`: values by name (the test accuracy, the run's folder, …). `commands`: command lines by what they do,
        to be copied.
        """
        names = max(map(len, [*shown, *commands]), default=0)
        lines = (*shown.items(), *commands.items())
        self.say(title, *(f"  {name:<{names}}  {value}" for name, value in lines))

    def epoch_text(self, epoch: int) -> str:
        """Return "epoch  9/30"."""
        return f"epoch {format_progress(epoch, math.ceil(self.epochs))}"


def line_of(shown: Mapping[str, str]) -> str:
    """Return "loss 0.5000  accuracy 25.00%"."""
    return "  ".join(f"{name} {value}" for name, value in shown.items())


def format_progress(number: int, total: int) -> str:
    """Return " 9/30", as wide as "30/30"."""
    return f"{number:>{len(str(total))}}/{total}"


def clock(seconds: float | None) -> str:
    """Return "0:01:23"."""
    return "-:--:--" if seconds is None else str(timedelta(seconds=round(seconds)))
