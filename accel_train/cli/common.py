"""What several commands need: tables, checks of their options, and imports that take long."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from accel_train import __version__
from accel_train.config.declaration import RECIPE_WORD
from accel_train.config.options import CommandOptions
from accel_train.config.schema import option_types
from accel_train.errors import is_terminal, one_line, print_line
from accel_train.launch.process import is_first_process


@contextlib.contextmanager
def importing(what: str = "") -> Iterator[None]:
    """Import torch and other large packages within it: the garbage collector is off, which saves a quarter of the time.

    The collector would go through all imported functions and classes again and again, and free none of them. With
    `what` (a recipe or a run), a terminal shows at once that the program has started: importing torch from a slow disk
    takes long.
    """
    if what and sys.stderr.isatty() and is_first_process():
        print_line(f"accel-train {__version__}: {what}; importing torch …", sys.stderr)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(CommandOptions):
    """A command that takes a recipe and the options of train, and makes no run."""

    TRAIN_OPTIONS = tuple(key for key in option_types() if key not in ("output-dir", "config-only"))

    recipe: Annotated[str, RECIPE_WORD]
    """A recipe, as for train."""


@dataclass(frozen=True, kw_only=True)
class WeightsOptions(CommandOptions):
    """A command that reads the weights of a run."""

    checkpoint: Path | None = None
    """best (by --best-metric on the validation split), last, or a checkpoint such as update-00001234; default: last,
    the final model, or the newest checkpoint of a run that has not finished."""
    trust_code: bool = False
    """Execute the code that the run keeps (RUN/code) and fetch the data that it names; read both first."""


SHORT = 24  # characters: a column of cells up to this width is never wrapped


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Collection[str] = ()) -> None:
    """Print a table: with wrapped cells on a terminal, elsewhere as whole, aligned columns for grep and cut.

    `numbers`: the titles of the columns that are aligned on the right.
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
    for row in rows:
        table.add_row(*map(Text, row))  # Text, so that a "[b]" in a name is not read as markup
    console.print(table)
