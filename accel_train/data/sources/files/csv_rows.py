"""Reads a CSV file row by row, and collects the mistakes in its rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from accel_train.errors import UserError, first_of, raise_mistakes
from accel_train.untrusted import NotRegularFileError, read_regular_file

DELIMITERS = ",\t;"
"""The first of these that is in the header separates the cells: Excel writes ; where the comma is the decimal point."""
SHOWN = 5  # rows with the same mistake that are named
MAX_BYTES = 1 << 32  # some ten million rows
LONGEST = 500  # characters of a message: a cell may have a hundred thousand

Row = tuple[int, list[str]]
"""Its number, as an editor shows it, and its cells without the spaces around them."""


class Mistakes:
    """Mistakes in the rows of a file: one line for each kind, with its first rows and the number of all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: dict[str, list[int]] = {}
        self._texts: dict[str, str] = {}

    def add(self, kind: str, row: int, text: str) -> None:
        """Record a mistake in `row`. The `text` of the first mistake of each `kind` is shown."""
        self._texts.setdefault(kind, text if len(text) <= LONGEST else f"{text[:LONGEST]}…")
        self._rows.setdefault(kind, []).append(row)

    def has(self, kind: str) -> bool:
        """Whether there is a mistake of this kind."""
        return kind in self._rows

    def raise_all(self, *, but: str = "") -> None:
        """Raise UserError with all of them, if there are any of another kind than `but`."""
        if self._rows.keys() - {but}:
            raise_mistakes(map(self.line, self._rows))

    def line(self, kind: str) -> str:
        """The mistake of this kind as one line; "" if there is none."""
        rows = self._rows.get(kind, [])
        if not rows:
            return ""
        named = ", ".join(map(str, rows[:SHOWN])) + ", …" * (len(rows) > SHOWN)
        others = f" {len(rows)} rows have such a mistake: {named}." if len(rows) > 1 else ""
        return f"{self.path}, row {rows[0]}: {self._texts[kind]}{others}"


def csv_rows(path: Path) -> Iterator[Row]:
    """Yield the header and all rows of the CSV file `path`; rows without any text are skipped. Raises UserError."""
    text = _read_text(path)
    header = next((line for line in io.StringIO(text) if line.strip()), "")
    delimiter = next((mark for mark in DELIMITERS if mark in header), ",")
    # strict: a quotation mark that is never closed is an error, not the end of the file.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True)
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(
                f"{path}, row {number}: it is not valid CSV ({error}). Is a quotation mark missing, or one too many? "
                'Inside quotation marks, a mark is written twice: "".'
            ) from error
        stripped = [cell.strip() for cell in cells]
        if any(stripped):
            yield number, stripped


def _read_text(path: Path) -> str:
    """The text of the file, without a byte order mark. Raises UserError."""
    try:
        content = read_regular_file(path, MAX_BYTES, follow=True)
    except NotRegularFileError as error:
        tables = sorted(file.name for file in path.glob("*.csv")) if path.is_dir() else []
        there = f" {first_of(tables)} {'is' if len(tables) == 1 else 'are'} in it." if tables else ""
        raise UserError(f"--data.root {path} is {error.strerror}; name a CSV file.{there}") from error
    except OSError as error:
        raise UserError(f"--data.root {path} cannot be read ({error.strerror}); name a CSV file.") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, row {number}: it is not UTF-8. Save the table as UTF-8 (in Excel: as CSV UTF-8)."
        ) from error
    if "\0" in text:
        number = text.count("\n", 0, text.index("\0")) + 1
        raise UserError(f"{path}, row {number}: it has a NUL byte, so this is not a text file or it is damaged.")
    return text
