"""Tables: drawn on a terminal, plain columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from accel_train.errors import is_terminal, one_line, print_line

SHORT = 24  # characters: a column of cells up to this width is never wrapped


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Collection[str] = (), grouped: bool = False
) -> None:
    """Print a table: with wrapped cells on a terminal, elsewhere as whole, aligned columns for grep and cut.

    `numbers`: the titles of the columns that are aligned on the right. `grouped`: a terminal shows the first cell only
    once for neighbouring rows in which it is the same.
    """
    head, rows = [one_line(title) for title in head], [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    if not is_terminal(sys.stdout):
        for row in [head, *rows]:
            cells = (
                cell.rjust(width) if title in numbers else cell.ljust(width)
                for cell, width, title in zip(row, widths, head, strict=True)
            )
            print_line("  ".join(cells).rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for i, title in enumerate(head):
        justify = "right" if title in numbers else "left"
        table.add_column(title, justify=justify, no_wrap=widths[i] <= SHORT, overflow="fold")  # type: ignore[arg-type]
    before = ""
    for row in rows:
        first = "" if grouped and row[0] == before else row[0]
        before = row[0]
        table.add_row(*map(Text, (first, *row[1:])))  # Text, so that a "[b]" in a name is not read as markup
    console.print(table)
