"""A table on the console: drawn for eyes on a terminal, aligned plain columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

SHORT = 24  # a column of cells up to this length is never broken


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Collection[str] = (), grouped: bool = False
) -> None:
    """On a terminal a table whose long cells wrap; elsewhere columns, whole and aligned, for grep and cut.

    `numbers` are the titles of columns that are aligned on the right. With `grouped` a terminal shows the first cell
    of neighbouring rows once only, if it is the same.
    """
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    if not sys.stdout.isatty():
        for row in [head, *rows]:
            cells = zip(head, row, widths, strict=True)
            aligned = (cell.rjust(width) if title in numbers else cell.ljust(width) for title, cell, width in cells)
            print("  ".join(aligned).rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for title, width in zip(head, widths, strict=True):
        justify = "right" if title in numbers else "left"
        table.add_column(title, justify=justify, overflow="fold", no_wrap=width <= SHORT)  # type: ignore[arg-type]
    before = ""
    for row in rows:
        first = "" if grouped and row[0] == before else row[0]
        before = row[0]
        table.add_row(*map(Text, (first, *row[1:])))  # Text: a "[b]" in a name is no markup
    Console().print(table)
