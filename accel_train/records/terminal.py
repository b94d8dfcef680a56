"""A run on a terminal: a live display, at any width, and above it a line for each epoch."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from accel_train.errors import one_line, wrapped
from accel_train.records.console import Console, clock, command_lines, line_of

REDRAWS_PER_SECOND = 4
WIDEST = 100  # characters of the bars, on wider terminals too


class LiveConsole(Console):
    """A display that a separate thread redraws at a fixed rate, under the lines of the epochs that have ended.

    `advance` only stores a number, so it costs next to nothing.
    """

    def __init__(self, rich: RichConsole, **values: Any) -> None:
        """`rich`: the terminal. `values`: see `Console`."""
        super().__init__(**values)
        self._rich = rich
        self._live: Live | None = None
        self._metrics: dict[str, str] = {}
        self._row: EpochRow | None = None  # of the epoch that has just ended
        self._row_update: int | None = None  # of the last one that was printed

    def __enter__(self) -> LiveConsole:
        # A forked data worker must not print through the display: it may inherit its lock in the locked state.
        os.register_at_fork(after_in_child=_use_plain_streams)
        self._live = Live(self, console=self._rich, refresh_per_second=REDRAWS_PER_SECOND)
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def advance(self, update: int) -> None:
        """Store that `update` updates of the run are done."""
        if self._row is not None and update > self._row.update:
            self._print_row()
        super().advance(update)

    def show_metrics(self, update: int, epoch: int, shown: dict[str, str]) -> None:
        """Show the training's metrics in the display."""
        self._metrics = shown

    def show_split(self, split: str, epoch: int, shown: dict[str, str], seconds: float) -> None:
        """Show the evaluations of an epoch on one line, in the display until training goes on."""
        row = self._row
        if row is None or row.epoch != epoch:
            self._print_row()
            row = EpochRow(epoch, self.pace.update, {}, 0.0)
        self._row = EpochRow(epoch, row.update, {**row.splits, split: shown}, row.seconds + seconds)

    def say(self, *lines: str) -> None:
        """Print lines above the display."""
        self._print_row()
        for line in lines:
            self._print(one_line(line))

    def warn(self, text: str) -> None:
        """Print a warning above the display."""
        self._print_row()
        self._print(one_line(f"warning: {text}"), "bold yellow")

    def finish(self, title: str, shown: Mapping[str, str], commands: Mapping[str, str]) -> None:
        """End the display and print the final screen. The commands have no frame, so that they can be copied."""
        self._close()
        title, shown = one_line(title), {name: one_line(value) for name, value in shown.items()}
        names = max(map(len, [*shown, *commands]), default=0)
        table = Table.grid(padding=(0, 2))
        for name, value in shown.items():
            table.add_row(Text(name, style="dim"), Text(value, style="bold"))
        panel = Panel(table, title=Text(title), title_align="left", expand=False, border_style="green")
        if self._rich.measure(panel, options=self._rich.options.update(width=1000)).maximum <= self._rich.width:
            self._rich.print(panel)
        else:  # a frame would break words
            self._print(title, "bold green")
            for name, value in shown.items():
                self._print(f"{name:<{names}}  {value}")
        for name, command in commands.items():
            for line in command_lines(f"{name:<{names}}  ", one_line(command), self._rich.width):
                self._rich.print(Text(line), soft_wrap=True)

    def _close(self) -> None:
        if self._live is not None:
            self._print_row()
            if self._row_update == self.pace.update:  # its metrics are older than the epoch's line
                self._metrics = {}
            self._live.stop()
            self._live = None

    def _print_row(self) -> None:
        """Print the line of the epoch that has ended, if it is not printed yet."""
        row, self._row = self._row, None
        if row is None:
            return
        self._row_update = row.update
        self._print(self._row_text(row))

    def _row_text(self, row: EpochRow) -> str:
        return row.lines(self.epoch_text(row.epoch), self._rich.width)

    def _print(self, text: str, style: str = "") -> None:
        """Print on the terminal, broken between words."""
        self._rich.print(Text(wrapped(text, self._rich.width), style=style), soft_wrap=True)

    def __rich__(self) -> Group:
        """Return the display as it is now: `Live` draws it at each refresh and under each printed line."""
        width = self._rich.width
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
        eta = f"eta {clock(self.pace.eta_seconds)}"
        is_narrow = width < 60  # no room for bars beside it
        for name, completed, of, note in (
            (self.epoch_text(epoch + 1), done, of_epoch, ""),
            ("total", update, total, "" if is_narrow else f"{eta}  "),
        ):
            bar = ProgressBar(total=max(of, 1), completed=completed)
            bars.add_row(name, bar, f"{note}{completed}/{of} {completed / max(of, 1):4.0%}")
        shown = [*([tuple(eta.split())] if is_narrow else []), *self._metrics.items()]
        metrics, column = Text(), 0
        for name, value in shown:
            if column and column + 3 + len(name) + 1 + len(value) > width:
                metrics.append("\n")
                column = 0
            gap = "   " if column else ""
            metrics.append(f"{gap}{name} ", style="dim").append(value, style="bold")
            column += len(gap) + len(name) + 1 + len(value)
        row = self._row
        return Group(*([] if row is None else [Text(self._row_text(row))]), bars, metrics)


def _use_plain_streams() -> None:
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


@dataclass(frozen=True)
class EpochRow:
    """The line of an epoch on a terminal, with what has been evaluated until now."""

    epoch: int
    update: int
    """At which the evaluation began."""
    splits: Mapping[str, Mapping[str, str]]
    seconds: float

    def lines(self, label: str, width: int) -> str:
        """Return the line, which goes on under its first split if it is longer than `width`."""
        text = label
        column = len(label)
        parts = [f"{split} {line_of(shown, ' ')}" for split, shown in self.splits.items()]
        parts[-1] += f"  {self.seconds:.1f} s"
        for part in parts:
            if column > len(label) and column + 2 + len(part) > width:
                text, column = f"{text}\n{'':{len(label)}}", len(label)
            text += f"  {part}"
            column += 2 + len(part)
        return text
