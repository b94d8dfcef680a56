"""A CSV table that lists image files and their labels, and optionally splits: `--data.name csv`.

The samples are sorted by path, as those of a folder are, so the order of the rows does not matter: a table of a
folder's images, in the folder, trains to the same bits as the folder, if its classes have the same order: numbers are
sorted as numbers here, and as text in a folder.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import posixpath
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import torch

from accel_train.config.schema import Data
from accel_train.data.sources.folder import FileImages, existing_files
from accel_train.data.sources.index import Index, SplitFiles, StringArray, indexed, splits_of_index
from accel_train.data.sources.splits import SPLIT_NAMES, Splits
from accel_train.errors import UserError, first_of, nearest, one_line
from accel_train.files import read_regular_file

DELIMITERS = ",\t;"
"""The first of these that is in the header separates the cells: Excel writes ; where the comma is the decimal point."""
SEPARATOR = ";"
"""Between several labels of an image. Alone in a cell: the image has no label."""
OPTIONS = {"path": "--data.image-column", "label": "--data.label-column"}
"""With which these columns may have another name."""
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")
SHOWN = 5  # wrong rows that an error names
LONGEST = 500  # characters of a message: a cell may have a hundred thousand
MAX_BYTES = 1 << 32  # some ten million rows

Labels = npt.NDArray[Any]
"""int64 [n], or bool [n, classes]."""


class Row(NamedTuple):
    """A row of a table."""

    number: int
    """As an editor shows it."""
    path: str
    """Normalised: cat/1.jpg, not ./cat//1.jpg. Relative to the table's folder, or absolute if outside of it."""
    label: str
    """The cell."""
    split: str
    """train, validation or test."""


def table(data: Data) -> Splits:
    """The images that the CSV file `data.root` lists. Raises UserError."""
    return splits_of_index(data, index_of(data), lambda files: FileImages(data.root.parent, files, data))


def index_of(data: Data) -> Index:
    """Raises UserError."""
    path, columns = data.root, {"path": data.image_column, "label": data.label_column}
    given = {role: name for role, name in columns.items() if name is not None}
    # Other columns of the same table are other data.
    kind = f"csv-{path.name}" + "".join(f"-{role}={quote(name, safe='')}" for role, name in given.items())
    names = {"path": "path", "label": "label", "split": "split", **given}
    return indexed(path.parent, kind, lambda: _look(path, names))


def _look(path: Path, names: Mapping[str, str]) -> Index:
    """Read the table, and look for its files. `names`: path, label or split -> its column. Raises UserError."""
    rows, ignored = _read(path, names)
    is_missing = ~existing_files(path.parent, [row.path for row in rows])
    missing = [row for row, lost in zip(rows, is_missing, strict=True) if lost]
    mistake = ""
    if missing:
        first = missing[0]
        mistake = one_line(
            f"{path}, row {first.number}: there is no file '{first.path}' in {path.parent}. {len(missing)} of the "
            f"table's {len(rows)} files are not there. Paths are relative to the table's folder, with their suffix.",
            LONGEST,
        )
    classes, labels = _labels(path, [row.label for row in rows])  # also of missing files: the others can be checked
    splits = np.array([row.split for row in rows])
    if not (splits == "train").any():
        found = " and ".join(sorted(set(splits)))
        raise UserError(
            f"{path}: no row has the split train, only {found}. To evaluate a run on all images of a table, "
            "remove the column split and give --split train."
        )
    if not (~is_missing & (splits == "train")).any():
        raise UserError(mistake)
    order = np.array(sorted(np.flatnonzero(~is_missing), key=lambda id: rows[id].path))
    files: dict[str, SplitFiles] = {}
    digest = hashlib.sha256(json.dumps(classes).encode())
    for split in ("train", "validation", "test"):
        ids = order[splits[order] == split]
        if not len(ids):
            continue
        paths, its_labels = [rows[id].path for id in ids], torch.from_numpy(labels[ids])
        files[split] = SplitFiles(StringArray(paths), its_labels)
        for part in (split, *paths):
            digest.update(f"{part}\0".encode())
        digest.update(labels[ids].tobytes())
    return Index(
        places=(path.name, *sorted({rows[id].path.rpartition("/")[0] for id in order})),
        classes=classes,
        splits=files,
        table=digest.hexdigest(),
        missing=tuple(sorted(row.path for row in missing)),
        ignored=ignored,
        mistake=mistake,
    )


def _read(path: Path, names: Mapping[str, str]) -> tuple[list[Row], str]:
    """The rows, and which columns are not used. Raises UserError if a column is not there, or with the first of the
    rows that have a mistake."""
    lines = _csv_rows(path)
    first, header = next(lines, (0, []))
    if not header:
        raise UserError(f"{path} is empty; its first row must name the columns, such as path,label.")
    columns = _columns(header, names, f"{path}, row {first}")
    folder = f"{path.parent.absolute().as_posix()}/"
    rows: dict[str, Row] = {}
    mistakes: list[str] = []
    for number, cells in lines:
        if len(cells) != len(header):
            mistakes.append(
                f"{path}, row {number}: it has {len(cells)} cells, but the header has {len(header)}; put a cell that "
                "contains the separator in quotation marks."
            )
            continue
        values = {role: cells[column] for role, column in columns.items()}
        image = posixpath.normpath(values["path"]).removeprefix(folder)
        mistake = _mistake(values)
        if not mistake and image in rows:
            mistake = f"the image '{image}' is also in row {rows[image].number}; keep one of these rows."
        if mistake:
            mistakes.append(one_line(f"{path}, row {number}: {mistake}", LONGEST))
            continue
        split = SPLIT_NAMES[values.get("split", "train").lower()]
        rows[image] = Row(number, image, sys.intern(values["label"]), split)  # one string, not a million
    if len(mistakes) > SHOWN:
        mistakes[SHOWN:] = [f"{path}: {len(mistakes)} rows have mistakes; these are the first {SHOWN}."]
    if mistakes:
        raise UserError(*mistakes)
    if not rows:
        raise UserError(f"{path} has a header, but no row with an image.")
    unused = [name for column, name in enumerate(header) if column not in columns.values()]
    return [*rows.values()], f"column{'s' * (len(unused) > 1)} {_quoted(unused)}" if unused else ""


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each row, as an editor shows it, and its cells without the spaces around them; rows without
    any text are skipped. Raises UserError."""
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
    except OSError as error:
        raise UserError(f"--data.root {path} cannot be read ({error.strerror}); name a CSV file.") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, row {number}: it is not UTF-8. Save the table as UTF-8 (in Excel: as CSV UTF-8)."
        ) from error


def _columns(header: Sequence[str], names: Mapping[str, str], where: str) -> dict[str, int]:
    """path, label, split -> number of the column; a table may lack splits. Raises UserError."""
    columns: dict[str, int] = {}
    for role, name in names.items():
        found = [column for column, title in enumerate(header) if title.casefold() == name.casefold()]
        if len(found) > 1:
            raise UserError(f"{where}: {len(found)} columns are named '{name}'; keep one.")
        if found:
            columns[role] = found[0]
        elif role in OPTIONS:
            raise UserError(
                f"{where}: there is no column '{name}'; found {_quoted(header)}.{nearest(name, header)} Name the "
                f"column of the {role} with {OPTIONS[role]}."
            )
    return columns


def _mistake(values: Mapping[str, str]) -> str:
    """What is wrong in the cells of a row, apart from its files; "": nothing."""
    for role, cell in values.items():
        if not cell.isprintable() and CONTROL.search(cell):
            return f"the {role} has a line break or another control character: {cell!r}."
        if not cell:
            several = f" If images of this table have several labels or none, write {SEPARATOR} for none."
            return f"the {role} is empty.{several if role == 'label' else ''}"
    path, split = values["path"], values.get("split", "train")
    if not path.startswith("/") and ".." in path.split("/"):
        return f"the path '{path}' leads outside the table's folder; move the table to a folder above."
    if split.lower() not in SPLIT_NAMES:
        return f"unknown split '{split}'; expected train, val or test.{nearest(split.lower(), SPLIT_NAMES)}"
    return ""


def _labels(path: Path, cells: Sequence[str]) -> tuple[tuple[str, ...], Labels]:
    """The classes, and the labels of all rows: int64 [n], or bool [n, classes] if any cell has a separator.

    Classes are sorted: by their numbers if all labels are whole numbers, else as text, as a folder's classes are.
    Raises UserError for one number in two spellings, 1 and 01.
    """
    parts = {cell: [part for part in map(str.strip, cell.split(SEPARATOR)) if part] for cell in set(cells)}
    names = {name for found in parts.values() for name in found}
    spelled: dict[int, str] = {}
    for name in sorted(names):
        if re.fullmatch(r"[+-]?\d+", name) and (other := spelled.setdefault(int(name), name)) != name:
            raise UserError(
                f"{path}: the labels '{other}' and '{name}' are one number: write it in one way in all rows."
            )
    classes = tuple(sorted(names, key=int) if all(map(NUMBER.fullmatch, names)) else sorted(names))
    number = {name: label for label, name in enumerate(classes)}
    if not any(SEPARATOR in cell for cell in cells):
        return classes, np.array([number[cell] for cell in cells], dtype=np.int64)
    sets = {cell: [number[name] for name in found] for cell, found in parts.items()}
    matrix = np.zeros((len(cells), len(classes)), dtype=np.bool_)
    for index, cell in enumerate(cells):
        matrix[index, sets[cell]] = True
    return classes, matrix


def _quoted(names: Sequence[str]) -> str:
    return first_of([f"'{name[:50]}'" for name in names], 8)
