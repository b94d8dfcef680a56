"""The parts of the live display on a terminal of any width."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.segment import Segment

# These cut lines off when they become narrower; all others break them anew.
BREAKS_LINES_ANEW = "XTERM_VERSION" not in os.environ and not os.environ.get("TERM", "").startswith(("linux", "rxvt"))


@dataclass(frozen=True)
class EpochRow:
    """The line of an epoch on a terminal, with what has been evaluated until now."""

    epoch: int
    update: int
    """At which the evaluation began."""
    splits: Mapping[str, Mapping[str, str]]
    seconds: float

    def lines(self, label: str, width: int | None, *, named: bool = True) -> str:
        """Return the line, which goes on under its first split if it is longer than `width`.

        `named`: with the names of the metrics, else only with their values.
        """
        text = label
        column = len(label)
        parts = [
            f"{split} {line_of(figures, ' ') if named else ' '.join(figures.values())}"
            for split, figures in self.splits.items()
        ]
        parts[-1] += f"  {self.seconds:.1f} s"
        for part in parts:
            if width is not None and column > len(label) and column + 2 + len(part) > width:
                text, column = f"{text}\n{'':{len(label)}}", len(label)
            text += f"  {part}"
            column += 2 + len(part)
        return text


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
