"""Tables: drawn on a terminal, plain aligned columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

SHORT = 24  # characters: a column of cells up to this width is never wrapped


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Collection[str] = (), grouped: bool = False
) -> None:
    """Print a table: with wrapped cells on a terminal, elsewhere as whole, aligned columns for grep and cut.

    `numbers`: the titles of the columns that are aligned on the right. `grouped`: a terminal shows the first cell only
    once for neighbouring rows in which it is the same.
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
        table.add_row(*map(Text, (first, *row[1:])))  # Text, so that a "[b]" in a name is not read as markup
    Console().print(table)
