"""Reads a CSV file row by row: which column is which, and the mistakes in its rows."""

from __future__ import annotations

import csv
import difflib
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from accel_train.errors import UserError, first_of, nearest, raise_mistakes
from accel_train.untrusted import NotRegularFileError, read_regular_file

DELIMITERS = ",\t;"
"""The first of these that is in the header separates the cells: Excel writes ; where the comma is the decimal point."""
SHOWN = 5  # rows with the same mistake that are named
MAX_BYTES = 1 << 32  # some ten million rows
LONGEST = 500  # characters of a message: a cell may have a hundred thousand

COLUMNS = {
    "path": ("path", "file", "filename", "filepath", "image"),
    "label": ("label", "labels", "class", "target"),
    "split": ("split",),
    "weight": ("weight",),
}
"""The names that a column may have, in capital or small letters: "File name" and file_name are filename."""
OPTIONS = {"path": "--data.image-column", "label": "--data.label-column"}
"""With which a column may have another name."""

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


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).casefold()


def columns_of(header: Sequence[str], given: Mapping[str, str], where: str) -> dict[str, int]:
    """path, label, … -> number of the column. `given`: the names of some. Raises UserError if one is missing, or if two
    could be meant."""
    columns: dict[str, int] = {}
    for role, usual in COLUMNS.items():
        names = (_plain(given[role]),) if role in given else usual
        found = [column for column, name in enumerate(header) if _plain(name) in names]
        if len(found) > 1:
            option = None if role in given else OPTIONS.get(role)
            raise UserError(
                f"{where}: the columns {quoted([header[column] for column in found])} could each be the {role}; "
                + f"say which one with {option}, or " * (option is not None)
                + f"keep one of these names, and rename or remove the other{'s' * (len(found) > 2)}."
            )
        if found:
            columns[role] = found[0]
        elif role in given:
            raise UserError(
                f"{where}: there is no column '{given[role]}' for the {role}; found {quoted(header)}."
                f"{nearest(given[role], header)}"
            )
        elif role in ("path", "label"):
            if not given and not any(_plain(name) in known for name in header for known in COLUMNS.values()):
                raise UserError(
                    f"{where}: the first row must name the columns, such as path,label; found {quoted(header)}."
                )
            similar = next((hint for name in header if (hint := nearest(_plain(name), names))), "")
            raise UserError(
                f"{where}: there is no column for the {role}; found {quoted(header)}, expected one of "
                f"{', '.join(names)}.{similar or f' Name it with {OPTIONS[role]}.'}"
            )
    return columns


def unused_notes(unused: Sequence[str], used: Iterable[str], where: str) -> tuple[str, ...]:
    """A warning for each of the `unused` columns whose name is like one that the table lacks. `used`: path, label, …"""
    lacking = [role for role in COLUMNS if role not in used]
    return tuple(
        f"{where}: the column '{name[:50]}' is not used. Did you mean '{close[0]}'?"
        for name in unused
        if (close := difflib.get_close_matches(_plain(name), lacking, n=1, cutoff=0.75))
    )


def quoted(names: Sequence[str]) -> str:
    return first_of([f"'{name[:50]}'" for name in names], 8)
