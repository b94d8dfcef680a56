"""What one sees of a run: a live display on a terminal, plain dense lines in a log. One process speaks."""

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

REDRAWS_PER_SECOND = 4


class Console:
    """The display of one run, as a context manager.

    `advance` only stores a number; the display is redrawn by time, in a thread of its own, whatever the pace.
    """

    def __init__(
        self, *, speaks: bool, total_updates: int, updates_per_epoch: int, epochs: int, first_update: int = 0
    ) -> None:
        """`first_update`: updates done by earlier starts of this run. Without `speaks` nothing is printed."""
        self.speaks = speaks
        self.total_updates = total_updates
        self.updates_per_epoch = updates_per_epoch
        self.epochs = epochs
        self._update = first_update
        self._first_update = first_update
        self._pace: tuple[float, int] | None = None  # time and update from which the speed is reckoned
        self._figures: dict[str, str] = {}
        self._rich = RichConsole(highlight=False)
        self.is_live = speaks and self._rich.is_terminal and not self._rich.is_dumb_terminal
        self._live: Live | None = None

    def __enter__(self) -> Console:
        if self.is_live:
            # A forked data worker must not print through the display: it may inherit its lock, locked.
            os.register_at_fork(after_in_child=_use_plain_streams)
            self._live = Live(console=self._rich, get_renderable=self._display, refresh_per_second=REDRAWS_PER_SECOND)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def advance(self, update: int) -> None:
        """`update` updates of the run are done. Costs next to nothing; call it after each one."""
        self._update = update

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to the end at this start's mean pace (evaluations included, the first updates left out)."""
        if self._pace is None:
            if self._update > self._first_update:
                self._pace = (time.monotonic(), self._update)
            return None
        since, update = self._pace
        if self._update <= update:
            return None
        return (time.monotonic() - since) / (self._update - update) * (self.total_updates - self._update)

    def train(
        self,
        update: int,
        epoch: int,
        *,
        loss: float,
        accuracy: float,
        lr: float,
        images_per_second: float,
        data_wait_fraction: float,
    ) -> None:
        """New figures of the training (epoch from 1, accuracy and fraction from 0 to 1)."""
        self.advance(update)
        self._figures = {
            "loss": f"{loss:.4f}",
            "accuracy": f"{accuracy:.2%}",
            "images/s": f"{images_per_second:.0f}",
            "lr": f"{lr:.4g}",
            "data wait": f"{data_wait_fraction:.0%}",
        }
        if self.speaks and not self.is_live:
            figures = "  ".join(f"{name} {value}" for name, value in self._figures.items())
            position = f"epoch {epoch}/{self.epochs}  update {update}/{self.total_updates}"
            print_line(f"{position}  {figures}  eta {_duration(self.eta_seconds)}")

    def evaluated(self, split: str, epoch: int, *, loss: float, accuracy: float, seconds: float) -> None:
        """One line for an evaluation at the end of `epoch` (from 1)."""
        figures = f"loss {loss:.4f}  accuracy {accuracy:.2%}  ({seconds:.1f} s)"
        self.say(f"epoch {epoch}/{self.epochs}  {split}  {figures}")

    def say(self, text: str) -> None:
        """Prints a line, above the display if there is one."""
        if self.is_live:
            self._rich.print(Text(text), soft_wrap=True)
        elif self.speaks:
            print_line(text)

    def warn(self, text: str) -> None:
        """Prints a warning; in a log, on stderr."""
        if self.is_live:
            self._rich.print(Text(f"warning: {text}", style="bold yellow"), soft_wrap=True)
        elif self.speaks:
            print_line(f"accel-train: warning: {text}", sys.stderr)

    def finish(self, title: str, figures: Mapping[str, str], commands: Mapping[str, str]) -> None:
        """Ends the display and prints the last screen.

        `figures`: name -> value (test accuracy, the run's folder, …). `commands`: what one may want -> what
        to type; they are printed outside of any frame, for copying.
        """
        self._close()
        if not self.speaks:
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
        """The display of this moment; called by the thread that redraws."""
        update = self._update
        extra = self.total_updates - self.epochs * self.updates_per_epoch  # the run began with another batch size
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


def _duration(seconds: float | None) -> str:
    return "-:--:--" if seconds is None else str(timedelta(seconds=round(seconds)))


def _use_plain_streams() -> None:
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
