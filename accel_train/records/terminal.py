"""A run on a terminal: the lines of a log, and under them a live display, at any width."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

from rich.columns import Columns
from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from accel_train.records.console import Console, clock
from accel_train.records.events import Ended, Logged

REDRAWS_PER_SECOND = 4
WIDEST = 100  # characters of the bars, on wider terminals too


class LiveConsole(Console):
    """A display that a separate thread redraws at a fixed rate; it vanishes at the end.

    An update only stores a number, so it costs next to nothing. Until the end, rich puts what is printed on stdout and
    stderr above the display, broken between words.
    """

    def __init__(self, rich: RichConsole, **values: Any) -> None:
        """`rich`: the terminal. `values`: see `Console`."""
        super().__init__(**values)
        self._rich = rich
        self._live = Live(self, console=rich, refresh_per_second=REDRAWS_PER_SECOND, transient=True)
        self._metrics: dict[str, str] = {}

    def __enter__(self) -> LiveConsole:
        # A forked data worker must not print through the display: it may inherit its lock in the locked state.
        os.register_at_fork(after_in_child=_use_plain_streams)
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show_training(self, event: Logged) -> None:
        """Show the training's metrics in the display."""
        self._metrics = self.training_metrics(event.metrics)

    def finish(self, event: Ended) -> None:
        """End the display, and print how the run has ended on the bare terminal: its commands can be copied."""
        self._live.stop()
        super().finish(event)

    def __rich__(self) -> Group:
        """Return the display as it is now: `Live` draws it at each refresh and under each printed line."""
        update, total = self.pace.update, self.pace.total_updates
        extra = total - round(self.epochs * self.updates_per_epoch)  # not 0 if the run began with another batch size
        epoch = min((update - extra) // self.updates_per_epoch, math.ceil(self.epochs) - 1)
        done = update - extra - epoch * self.updates_per_epoch
        of_epoch = min(self.updates_per_epoch, total - extra - epoch * self.updates_per_epoch)
        bars = Table.grid(padding=(0, 1))
        bars.width = min(self._rich.width, WIDEST)
        bars.add_column(no_wrap=True)
        bars.add_column(ratio=1)
        bars.add_column(justify="right", no_wrap=True)
        for name, completed, of in ((self.epoch_text(epoch + 1), done, of_epoch), ("total", update, total)):
            bar = ProgressBar(total=max(of, 1), completed=completed)
            bars.add_row(name, bar, f"{completed}/{of} {completed / max(of, 1):4.0%}")
        shown = {"eta": clock(self.pace.eta_seconds), **self._metrics}
        metrics = [Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in shown.items()]
        return Group(bars, Columns(metrics, padding=(0, 3, 0, 0)))


def _use_plain_streams() -> None:
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
