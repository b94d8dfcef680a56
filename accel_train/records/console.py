"""What a run prints: a live display on a terminal, one plain line per log interval elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from accel_train.errors import print_line
from accel_train.records.metrics import headlines

REDRAWS_PER_SECOND = 4


class Console:
    """The output of one run, as a context manager.

    A separate thread redraws the display at a fixed rate. `advance` only stores a number, so it costs next to nothing.
    """

    def __init__(
        self, *, prints: bool, total_updates: int, updates_per_epoch: int, epochs: int, first_update: int = 0
    ) -> None:
        """`prints`: whether this process prints at all. `first_update`: updates done by earlier starts of the run."""
        self.prints = prints
        self.total_updates = total_updates
        self.updates_per_epoch = updates_per_epoch
        self.epochs = epochs
        self._update = first_update
        self._first_update = first_update
        self._pace: tuple[float, int] | None = None  # time and update from which the speed is computed
        self._figures: dict[str, str] = {}
        self._rich = RichConsole(highlight=False)
        self.is_live = prints and self._rich.is_terminal and not self._rich.is_dumb_terminal
        self._live: Live | None = None

    def __enter__(self) -> Console:
        if self.is_live:
            # A forked data worker must not print through the display: it may inherit its lock in the locked state.
            os.register_at_fork(after_in_child=_use_plain_streams)
            self._live = Live(console=self._rich, get_renderable=self._display, refresh_per_second=REDRAWS_PER_SECOND)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def advance(self, update: int) -> None:
        """Store that `update` updates of the run are done."""
        self._update = update

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to the end at the mean speed since the first update of this start, evaluations included.

        None until there is a speed.
        """
        if self._pace is None:
            if self._update > self._first_update:
                self._pace = (time.monotonic(), self._update)
            return None
        since, update = self._pace
        if self._update <= update:
            return None
        return (time.monotonic() - since) / (self._update - update) * (self.total_updates - self._update)

    def show_training(self, update: int, epoch: int, figures: Mapping[str, float]) -> None:
        """Show the training's metrics, and its "images_per_second", "lr" and "data_wait_fraction" (0 to 1).

        `epoch` counts from 1.
        """
        self.advance(update)
        self._figures = {
            **headlines(figures),
            "images/s": f"{figures['images_per_second']:.0f}",
            "lr": f"{figures['lr']:.4g}",
            "data wait": f"{figures['data_wait_fraction']:.0%}",
        }
        if self.prints and not self.is_live:
            position = f"epoch {epoch}/{self.epochs}  update {update}/{self.total_updates}"
            print_line(f"{position}  {_line(self._figures)}  eta {_duration(self.eta_seconds)}")

    def show_evaluation(self, split: str, epoch: int, figures: Mapping[str, float], seconds: float) -> None:
        """Print a line with the metrics of an evaluation at the end of `epoch`, which counts from 1."""
        self.say(f"epoch {epoch}/{self.epochs}  {split}  {_line(headlines(figures))}  ({seconds:.1f} s)")

    def say(self, text: str) -> None:
        """Print a line, above the display if there is one."""
        if self.is_live:
            self._rich.print(Text(text), soft_wrap=True)
        elif self.prints:
            print_line(text)

    def warn(self, text: str) -> None:
        """Print a warning: above the display if there is one, else on stderr."""
        if self.is_live:
            self._rich.print(Text(f"warning: {text}", style="bold yellow"), soft_wrap=True)
        elif self.prints:
            print_line(f"accel-train: warning: {text}", sys.stderr)

    def finish(self, title: str, figures: Mapping[str, str], commands: Mapping[str, str]) -> None:
        """End the display and print the final screen.

        `figures`: values by name (the test accuracy, the run's folder, …). `commands`: command lines by what they do;
        they are printed without a frame, so that they can be copied.
        """
        self._close()
        if not self.prints:
            return
        width = max(map(len, [*figures, *commands]), default=0)
        if not self.is_live:
            lines = [f"  {name:<{width}}  {text}" for name, text in [*figures.items(), *commands.items()]]
            print_line("\n".join([title, *lines]))
            return
        table = Table.grid(padding=(0, 2))
        for name, value in figures.items():
            table.add_row(Text(name, style="dim"), Text(value, style="bold", overflow="fold"))
        self._rich.print(Panel(table, title=Text(title), title_align="left", expand=False, border_style="green"))
        for name, command in commands.items():
            self._rich.print(Text.assemble((f"{name:<{width}}  ", "dim"), command), soft_wrap=True)

    def _close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _display(self) -> Group:
        """Return the current display. The thread that redraws it calls this."""
        update = self._update
        extra = (
            self.total_updates - self.epochs * self.updates_per_epoch
        )  # not 0 if the run began with another batch size
        epoch = min((update - extra) // self.updates_per_epoch, self.epochs - 1)
        done = update - extra - epoch * self.updates_per_epoch
        bars = Table.grid(padding=(0, 1), expand=True)
        bars.add_column(no_wrap=True)
        bars.add_column(ratio=1)
        bars.add_column(justify="right", no_wrap=True)
        bars.add_column(no_wrap=True)
        for name, completed, total, note in (
            (f"epoch {epoch + 1}/{self.epochs}", done, self.updates_per_epoch, ""),
            ("total", update, self.total_updates, f"eta {_duration(self.eta_seconds)}"),
        ):
            bar = ProgressBar(total=max(total, 1), completed=completed)
            bars.add_row(name, bar, f"{completed}/{total} {completed / max(total, 1):4.0%}", note)
        figures = Text()
        for name, value in self._figures.items():
            figures.append(f"{name} ", style="dim").append(f"{value}   ", style="bold")
        return Group(bars, figures)


def _line(figures: Mapping[str, str]) -> str:
    return "  ".join(f"{name} {value}" for name, value in figures.items())


def _duration(seconds: float | None) -> str:
    return "-:--:--" if seconds is None else str(timedelta(seconds=round(seconds)))


def _use_plain_streams() -> None:
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
