"""Tables, drawn on a terminal and plain columns elsewhere; the parts of a run's display on a terminal of any width, and
its place in a notebook."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment

from accel_train.errors import is_terminal, one_line, print_line, wrapped

SHORT = 24  # characters: a column of cells up to this width is never wrapped


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Collection[str] = (), grouped: bool = False
) -> None:
    """Print a table: with wrapped cells on a terminal, elsewhere as whole, aligned columns for grep and cut.

    On a terminal that is too narrow for it, the long cells of a row are written under the short ones.

    `numbers`: the titles of the columns that are aligned on the right. `grouped`: a terminal shows the first cell only
    once for neighbouring rows in which it is the same.
    """
    head, rows = [one_line(title) for title in head], [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    def aligned(row: Sequence[str], shown: Iterable[int]) -> str:
        cells = (row[i].rjust(widths[i]) if head[i] in numbers else row[i].ljust(widths[i]) for i in shown)
        return "  ".join(cells).rstrip()

    if not is_terminal(sys.stdout):
        for row in [head, *rows]:
            print_line(aligned(row, range(len(head))))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    long = [i for i, width in enumerate(widths) if width > SHORT]
    # Paths are broken only in the first column of groups, which cannot be divided over several lines.
    words = {i: max(len(word) for row in [head, *rows] for word in row[i].split() or [""]) for i in long}
    if grouped:
        words[0] = min(widths[0], SHORT)
    if sum(words.get(i, width) + 2 for i, width in enumerate(widths)) - 2 > console.width:
        for line in _on_several_lines(head, rows, widths, aligned, console.width):
            console.print(Text(line), soft_wrap=True)
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for i, title in enumerate(head):
        justify = "right" if title in numbers else "left"
        table.add_column(title, justify=justify, no_wrap=i not in long, overflow="fold", min_width=words.get(i))  # type: ignore[arg-type]
    before = ""
    for row in rows:
        first = "" if grouped and row[0] == before else row[0]
        before = row[0]
        table.add_row(*map(Text, (first, *row[1:])))  # Text, so that a "[b]" in a name is not read as markup
    console.print(table)


def _on_several_lines(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    widths: Sequence[int],
    aligned: Callable[[Sequence[str], Iterable[int]], str],
    width: int,
) -> Iterator[str]:
    """Return the lines of a table that is too wide: short cells in columns, each long one on a line of its own."""
    short = [i for i in range(1, len(head)) if widths[i] <= SHORT]
    first = widths[0] + 2
    if first + sum(widths[i] + 2 for i in short) - 2 > width:
        first = 2  # the first cell has a line for itself
    if first + sum(widths[i] + 2 for i in short) - 2 > width:
        short = []
    long = [i for i in range(1, len(head)) if i not in short]
    titles = max((len(head[i]) for i in long), default=0)
    for row in [head, *rows]:
        if first > 2:
            yield f"{row[0]:<{first}}{aligned(row, short)}".rstrip()
        else:
            yield row[0]
            if short:
                yield f"  {aligned(row, short)}"
        for i in long:
            if row[i] and row is not head:
                yield wrapped(f"  {head[i]:<{titles}}  {row[i]}", width)


# These cut lines off when they become narrower; all others break them anew.
BREAKS_LINES_ANEW = "XTERM_VERSION" not in os.environ and not os.environ.get("TERM", "").startswith(("linux", "rxvt"))


SHORT_NAMES = {"accuracy": "acc"}


@dataclass(frozen=True)
class EpochRow:
    """The line of an epoch on a terminal, with what has been evaluated until now."""

    epoch: int
    update: int
    """At which the evaluation began."""
    splits: Mapping[str, Mapping[str, str]]
    seconds: float

    def lines(self, label: str, width: int | None, *, short: bool = False) -> str:
        """Return the line, which goes on under its first split if it is longer than `width`.

        `short`: with the short names of the metrics that have one, so that the line fits more often.
        """
        text = label
        column = len(label)
        names = SHORT_NAMES if short else {}
        parts = [
            f"{split} {line_of({names.get(name, name): value for name, value in figures.items()}, ' ')}"
            for split, figures in self.splits.items()
        ]
        parts[-1] += f"  {self.seconds:.1f} s"
        for part in parts:
            if width is not None and column > len(label) and column + 2 + len(part) > width:
                text, column = f"{text}\n{'':{len(label)}}", len(label)
            text += f"  {part}"
            column += 2 + len(part)
        return text

    def needs_short_names(self, label: str, width: int) -> bool:
        """Whether the long names do not fit into `width`. Where short ones need several lines, too, long ones may."""
        if len(self.lines(label, None, short=True)) <= width:
            return len(self.lines(label, None)) > width
        return max(map(len, self.lines(label, width).split("\n"))) > width


class Display:
    """The live display at the width that the terminal has when it is drawn.

    If a terminal becomes narrower, most programs break the lines on it anew, so that the display takes more rows than
    rich would erase. So those rows are erased here first.
    """

    def __init__(self, draw: Callable[[int], Group], drawn: list[int]) -> None:
        """`draw`: makes the display for a width. `drawn`: the lengths of the lines on the terminal, kept here."""
        self.draw, self.drawn = draw, drawn

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        rows = sum(max(1, -(-length // width)) for length in self.drawn)
        if rows > len(self.drawn) and BREAKS_LINES_ANEW:
            # Go to the first row, erase all, and go down as many rows as rich will go up. It writes after this.
            console.file.write(f"\r\x1b[{rows - 1}A\x1b[J" + "\n" * (len(self.drawn) - 1))
        lines = console.render_lines(self.draw(width), options, pad=False)
        self.drawn[:] = [Segment.get_line_length(line) for line in lines]
        for line in lines:
            yield from line
            yield Segment.line()


def command_lines(label: str, command: str, width: int | None) -> list[str]:
    """Return the lines that show a command after a label.

    Where they are longer than `width`, the command begins on a line of its own and goes on after a backslash, so that
    it can be copied into a shell.
    """
    if width is None or len(label) + len(command) <= width:
        return [label + command]
    lines, line = [label.rstrip()], " "
    for word in re.findall(r"(?:'[^']*'|\"[^\"]*\"|[^\s'\"])+", command):
        if line.strip() and len(line) + 1 + len(word) + 2 > width:
            lines.append(f"{line} \\")
            line = "   "
        line += f" {word}"
    return [*lines, line]


def line_of(figures: Mapping[str, str], between: str = "  ") -> str:
    """Return "loss 0.5000  accuracy 25.00%"."""
    return between.join(f"{name} {value}" for name, value in figures.items())


PAGE = '<pre style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'


class NotebookDisplay:
    """As rich's Live, which needs the package ipywidgets for this: one output of the cell, which is drawn again."""

    def __init__(self, draw: Callable[[int], RenderableType], width: int, redraws_per_second: int) -> None:
        self.draw, self.width, self.seconds = draw, width, 1 / redraws_per_second
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="notebook display", daemon=True)
        self._shown: dict[str, str] = {}
        self._handle: Any = None

    def start(self) -> None:
        """Show the display, and draw it again from now on."""
        display: Any = importlib.import_module("IPython.display")
        self._shown = self._drawn()
        self._handle = display.display(self._shown, raw=True, display_id=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave the display as it is now."""
        self._ended.set()
        self._thread.join()
        self._update()

    def _redraw(self) -> None:
        while not self._ended.wait(self.seconds):
            self._update()

    def _update(self) -> None:
        with contextlib.suppress(Exception):  # a notebook that is closed must not end the run
            drawn = self._drawn()
            if drawn != self._shown:
                self._shown = drawn
                self._handle.update(drawn, raw=True)

    def _drawn(self) -> dict[str, str]:
        console = Console(
            file=io.StringIO(), record=True, width=self.width, force_jupyter=False, force_terminal=True, highlight=False
        )
        console.print(self.draw(self.width))
        html = console.export_html(inline_styles=True, code_format=PAGE, clear=False)
        return {"text/html": html, "text/plain": console.export_text()}
