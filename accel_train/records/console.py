"""What a run prints: a live display on a terminal and in a notebook, one plain line per log interval elsewhere."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from accel_train.errors import LOGGER, columns, is_terminal, one_line, wrapped
from accel_train.records.events import (
    Ended,
    Evaluated,
    Event,
    ImageSizeChanged,
    Logged,
    Rewound,
    Said,
    Skipped,
    UpdateDone,
    Warned,
)
from accel_train.records.meter import Pace
from accel_train.records.metrics import headlines
from accel_train.records.terminal import Display, EpochRow, NotebookDisplay, command_lines, line_of

REDRAWS_PER_SECOND = 4
WIDEST = 100  # characters of the bars, on wider terminals too


class Console:
    """The output of one run, as a context manager.

    A separate thread redraws the display at a fixed rate. `advance` only stores a number, so it costs next to nothing.
    """

    def __init__(
        self,
        *,
        prints: bool,
        total_updates: int,
        updates_per_epoch: int,
        epochs: float,
        first_update: int = 0,
        chosen: Sequence[str] = (),
    ) -> None:
        """`prints`: whether this process prints at all. `first_update`: updates done by earlier starts of the run.
        `chosen`: the metrics of --metrics, which are shown, too."""
        self.prints, self.chosen = prints, chosen
        self.pace = Pace(total_updates, first_update)
        self.updates_per_epoch = updates_per_epoch
        self.epochs = epochs
        self._figures: dict[str, str] = {}
        self._rich = RichConsole(highlight=False)
        self.is_live = prints and is_terminal(sys.stdout) and self._rich.is_terminal and not self._rich.is_dumb_terminal
        if prints and self._rich.is_jupyter:  # what notebook_launcher has forked cannot change the output of a cell
            self.is_live = "RANK" not in os.environ
        self._live: Live | NotebookDisplay | None = None
        self._drawn: list[int] = []  # the lengths of the lines of the display, as they are on the terminal
        self._row: EpochRow | None = None  # of the epoch that has just ended
        self._row_update: int | None = None  # of the last one that was printed
        self._short: bool | None = None  # whether the lines of epochs have short names of metrics; None: not decided

    def __enter__(self) -> Console:
        if self.is_live and self._rich.is_jupyter:
            self._live = NotebookDisplay(self._draw, WIDEST, REDRAWS_PER_SECOND)
            self._live.start()
        elif self.is_live:
            # A forked data worker must not print through the display: it may inherit its lock in the locked state.
            os.register_at_fork(after_in_child=_use_plain_streams)
            # The thread that redraws it calls this.
            display = partial(Display, self._draw, self._drawn)
            self._live = Live(console=self._rich, get_renderable=display, refresh_per_second=REDRAWS_PER_SECOND)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def handle(self, event: Event) -> Sequence[str]:
        """Show an event."""
        match event:
            case UpdateDone():
                self.advance(event.update)
            case Logged():
                self.show_training(event.update, event.epoch, event.figures)
            case Evaluated():
                self.show_evaluation(event.name, event.epoch, event.figures, event.seconds)
            case ImageSizeChanged():
                self.say(f"{self._epoch(event.epoch)}  training images of {event.size}x{event.size} pixels")
            case Said():
                self.say(*event.lines)
            case Warned():
                self.warn(event.text)
            case Skipped():
                self.warn(f"update {event.update} is not finite: {event.reason}; {event.action}")
            case Rewound():
                self.say(f"going back to the checkpoint of update {event.update}")
                self.advance(event.update)
            case Ended():
                self.finish(event.title, event.shown, event.commands)
        return ()

    def advance(self, update: int) -> None:
        """Store that `update` updates of the run are done."""
        if self._row is not None and update > self._row.update:
            self._print_row()
        self.pace.update = update

    def show_training(self, update: int, epoch: int, figures: Mapping[str, float]) -> None:
        """Show the training's metrics, and its "images_per_second", "lr" and "data_wait_fraction" (0 to 1).

        `epoch` counts from 1.
        """
        self.advance(update)
        self._figures = {
            **headlines(figures, self.chosen),
            "images/s": f"{figures['images_per_second']:.0f}",
            "lr": f"{figures['lr']:.4g}",
            "data wait": f"{figures['data_wait_fraction']:.0%}",
        }
        if self.prints and not self.is_live:
            position = f"{self._epoch(epoch)}  update {_format_progress(update, self.pace.total_updates)}"
            LOGGER.info(f"{position}  {line_of(self._figures)}  eta {_duration(self.pace.eta_seconds)}")

    def show_evaluation(self, split: str, epoch: int, figures: Mapping[str, float], seconds: float) -> None:
        """Show the metrics of an evaluation at the end of `epoch`, which counts from 1.

        A log has a line for each evaluation. On a terminal, those of an epoch share a line: the display shows it until
        training goes on.
        """
        # As wide as "100.00%", or as "0.0123".
        shown = {
            name: f"{value:>{7 if value.endswith('%') else 6}}"
            for name, value in headlines(figures, self.chosen).items()
        }
        if not self.is_live:
            self.say(f"{self._epoch(epoch)}  {split:<5}  {line_of(shown)}  ({seconds:.1f} s)")
            return
        row = self._row
        if row is None or row.epoch != epoch:
            self._print_row()
            row = EpochRow(epoch, self.pace.update, {}, 0.0)
        self._row = EpochRow(epoch, row.update, {**row.splits, split: shown}, row.seconds + seconds)

    def say(self, *lines: str) -> None:
        """Print lines, above the display if there is one."""
        if self.is_live:
            self._print_row()
        for line in lines:
            if self.is_live:
                self._print(one_line(line))
            elif self.prints:
                LOGGER.info(line)

    def warn(self, text: str) -> None:
        """Print a warning: above the display if there is one, else by the logger, on stderr."""
        if self.is_live:
            self._print_row()
            self._print(one_line(f"warning: {text}"), "bold yellow")
        elif self.prints:
            LOGGER.warning(text)

    def finish(self, title: str, figures: Mapping[str, str], commands: Mapping[str, str]) -> None:
        """End the display and print the final screen.

        `figures`: values by name (the test accuracy, the run's folder, …). `commands`: command lines by what they do;
        they are printed without a frame, so that they can be copied.
        """
        self._close()
        if not self.prints:
            return
        title, figures = one_line(title), {name: one_line(value) for name, value in figures.items()}
        commands = {name: one_line(command) for name, command in commands.items()}
        names = max(map(len, [*figures, *commands]), default=0)
        width = self._rich.width if self.is_live else columns(sys.stdout)
        indent = "" if self.is_live else "  "
        steps = [
            line
            for name, command in commands.items()
            for line in command_lines(f"{indent}{name:<{names}}  ", command, width)
        ]
        if not self.is_live:
            for line in (title, *(f"  {name:<{names}}  {value}" for name, value in figures.items()), *steps):
                LOGGER.info(line)
            return
        table = Table.grid(padding=(0, 2))
        for name, value in figures.items():
            table.add_row(Text(name, style="dim"), Text(value, style="bold"))
        panel = Panel(table, title=Text(title), title_align="left", expand=False, border_style="green")
        if self._rich.measure(panel, options=self._rich.options.update(width=1000)).maximum <= self._rich.width:
            self._rich.print(panel)
        else:  # a frame would break words
            self._print(title, "bold green")
            for name, value in figures.items():
                self._print(f"{name:<{names}}  {value}")
        for line in steps:
            self._rich.print(Text(line), soft_wrap=True)

    def _close(self) -> None:
        if self._live is not None:
            self._print_row()
            if self._row_update == self.pace.update:  # its figures are older than the epoch's line
                self._figures = {}
            self._live.stop()
            self._live = None

    def _print_row(self) -> None:
        """Print the line of the epoch that has ended, if it is not printed yet."""
        row, self._row = self._row, None
        if row is None:
            return
        self._row_update = row.update
        if self._short is None:  # the first line decides, so that all look the same
            self._short = row.needs_short_names(self._epoch(row.epoch), self._rich.width)
        self._print(self._row_text(row))

    def _row_text(self, row: EpochRow) -> str:
        return row.lines(self._epoch(row.epoch), width=self._rich.width, short=self._short is True)

    def _print(self, text: str, style: str = "") -> None:
        """Print on the terminal, broken between words."""
        self._rich.print(Text(wrapped(text, self._rich.width), style=style), soft_wrap=True)

    def _epoch(self, epoch: int) -> str:
        return f"epoch {_format_progress(epoch, math.ceil(self.epochs))}"

    def _draw(self, width: int) -> Group:
        """Return the display for a terminal of this width."""
        update, total = self.pace.update, self.pace.total_updates
        extra = total - round(self.epochs * self.updates_per_epoch)  # not 0 if the run began with another batch size
        epoch = min((update - extra) // self.updates_per_epoch, math.ceil(self.epochs) - 1)
        done = update - extra - epoch * self.updates_per_epoch
        of_epoch = min(self.updates_per_epoch, total - extra - epoch * self.updates_per_epoch)
        bars = Table.grid(padding=(0, 1))
        bars.width = min(width, WIDEST)
        bars.add_column(no_wrap=True)
        bars.add_column(ratio=1)
        bars.add_column(justify="right", no_wrap=True)
        eta = f"eta {_duration(self.pace.eta_seconds)}"
        is_narrow = width < 60  # no room for bars beside it
        for name, completed, of, note in (
            (self._epoch(epoch + 1), done, of_epoch, ""),
            ("total", update, total, "" if is_narrow else f"{eta}  "),
        ):
            bar = ProgressBar(total=max(of, 1), completed=completed)
            bars.add_row(name, bar, f"{note}{completed}/{of} {completed / max(of, 1):4.0%}")
        shown = [*([tuple(eta.split())] if is_narrow else []), *self._figures.items()]
        figures, column = Text(), 0
        for name, value in shown:
            if column and column + 3 + len(name) + 1 + len(value) > width:
                figures.append("\n")
                column = 0
            gap = "   " if column else ""
            figures.append(f"{gap}{name} ", style="dim").append(value, style="bold")
            column += len(gap) + len(name) + 1 + len(value)
        row = self._row
        return Group(*([] if row is None else [Text(self._row_text(row))]), bars, figures)


def _format_progress(number: int, total: int) -> str:
    """Return " 9/30", as wide as "30/30"."""
    return f"{number:>{len(str(total))}}/{total}"


def _duration(seconds: float | None) -> str:
    return "-:--:--" if seconds is None else str(timedelta(seconds=round(seconds)))


def _use_plain_streams() -> None:
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
