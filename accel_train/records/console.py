"""What a run prints: a plain line for each log interval. On a terminal, terminal.py shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta

from accel_train.errors import LOGGER
from accel_train.records.events import Ended, Evaluated, Event, Logged, Said, Skipped, Warned
from accel_train.records.meter import Pace
from accel_train.task import Metric, headlines


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
            case Logged():
                self.show_training(event)
            case Evaluated():
                self.show_evaluation(event)
            case Said():
                for line in event.lines:
                    LOGGER.info(line)
            case Warned():
                LOGGER.warning(event.text)
            case Skipped():
                LOGGER.warning(f"update {event.update} is not finite: {event.reason}; it is skipped")
            case Ended():
                self.finish(event)
        return ()

    def show_training(self, event: Logged) -> None:
        """Show the training's metrics, and its speed."""
        position = f"{self.epoch_text(event.epoch)}  update {format_progress(event.update, self.pace.total_updates)}"
        shown = line_of(self.training_metrics(event.metrics))
        LOGGER.info(f"{position}  {shown}  eta {clock(self.pace.eta_seconds)}")

    def training_metrics(self, values: Mapping[str, float]) -> dict[str, str]:
        """Return what is shown of the training's metrics, by name."""
        return {
            **headlines(values, self.metrics),
            "images/s": f"{values['images_per_second']:.0f}",
            "lr": f"{values['lr']:.4g}",
            "data wait": f"{values['data_wait_fraction']:.0%}",
        }

    def show_evaluation(self, event: Evaluated) -> None:
        """Show the metrics of an evaluation."""
        # As wide as "100.00%", or as "0.0123".
        shown = {
            name: f"{value:>{7 if value.endswith('%') else 6}}"
            for name, value in headlines(event.metrics, self.metrics).items()
        }
        LOGGER.info(f"{self.epoch_text(event.epoch)}  {event.name:<5}  {line_of(shown)}  ({event.seconds:.1f} s)")

    def finish(self, event: Ended) -> None:
        """Show how the run has ended, and command lines to copy."""
        names = max(map(len, [*event.shown, *event.commands]), default=0)
        lines = (*event.shown.items(), *event.commands.items())
        for line in (event.title, *(f"  {name:<{names}}  {value}" for name, value in lines)):
            LOGGER.info(line)

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
