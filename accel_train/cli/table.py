"""Tables: drawn on a terminal, plain columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

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
