"""A CSV table that lists image files and their labels, and optionally splits: `--data.name csv`.

The samples are sorted by path, as those of a folder are, so the order of the rows does not matter: a table of a
folder's images, in the folder, trains to the same bits as the folder, if its classes have the same order: numbers are
sorted as numbers here, and as text in a folder.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import io
import json
import posixpath
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import torch

from accel_train.config.schema import Data
from accel_train.data.sources.files.folder import MISSING, FileImages, file_stats, find_images
from accel_train.data.sources.files.index import Index, Progress, SplitFiles, indexed, splits_of_index
from accel_train.data.sources.shared import SharedArray, StringArray
from accel_train.data.sources.splits import SPLIT_NAMES, Splits
from accel_train.errors import UserError, first_of, nearest, raise_mistakes
from accel_train.untrusted import read_regular_file

SEPARATOR = ";"
"""Between several labels of an image. Alone in a cell: the image has no label."""
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
NUMBER = re.compile(r"[+-]?[0-9]{1,18}")

Labels = npt.NDArray[Any]
"""int64 [n], or bool [n, classes]."""


@dataclass
class _Rows:
    """The rows of a table, in the table's order; each list has one entry per row."""

    numbers: list[int] = field(default_factory=list)
    """As an editor shows them."""
    paths: list[str] = field(default_factory=list)
    """Normalised: cat/1.jpg, not ./cat//1.jpg. Relative to the table's folder, or absolute if outside of it."""
    labels: list[str] = field(default_factory=list)
    """The cells."""
    splits: list[str] = field(default_factory=list)
    """train, validation or test."""
    ignored: str = ""
    notes: tuple[str, ...] = ()


def table(data: Data) -> Splits:
    """The images that the CSV file `data.root` lists. Raises UserError."""
    return splits_of_index(data, index_of(data), lambda files: FileImages(data.root.parent, files, data))


def index_of(data: Data) -> Index:
    """Raises UserError."""
    path, columns = data.root, {"path": data.image_column, "label": data.label_column}
    given = {role: name for role, name in columns.items() if name is not None}
    # Other columns of the same table are other data.
    kind = f"csv-{path.name}" + "".join(f"-{role}={quote(name, safe='')}" for role, name in given.items())
    return indexed(path.parent, kind, lambda progress: _look(path, given, progress), verify=data.verify)


def _look(path: Path, given: Mapping[str, str], progress: Progress) -> Index:
    """Read the table, and look for its files. `given`: path or label -> the name of that column. Raises UserError."""
    mistakes = Mistakes(path)
    rows = _read(path, given, mistakes)
    # Before any label is looked at, so that all of these mistakes are told at once.
    stats = file_stats(path.parent, rows.paths, progress)
    if (stats == MISSING).all() and _complete_paths(path.parent, rows, mistakes):
        stats = file_stats(path.parent, rows.paths, progress)
    missing = np.flatnonzero((stats == MISSING).all(1)).tolist()
    for index in missing:
        image = rows.paths[index]
        mistakes.add("missing", rows.numbers[index], f"there is no file '{image}' in {path.parent}.")
    mistakes.raise_all(but="missing")
    classes, labels = _labels(rows.labels)
    splits = np.array(rows.splits)
    _check_training_classes(rows, classes, labels, splits == "train", mistakes)
    mistakes.raise_all(but="missing")

    lost = set(missing)  # the other images can be read, and checked
    there = [index for index in range(len(rows.paths)) if index not in lost]
    if not any(rows.splits[index] == "train" for index in there):
        mistakes.raise_all()
    order = np.array(sorted(there, key=rows.paths.__getitem__))
    files: dict[str, SplitFiles] = {}
    digest = hashlib.sha256(json.dumps(classes).encode())
    for split in ("train", "validation", "test"):
        ids = order[splits[order] == split]
        if not len(ids):
            continue
        paths, its_labels = [rows.paths[id] for id in ids], torch.from_numpy(labels[ids])
        files[split] = SplitFiles(StringArray(paths), its_labels, stats=SharedArray(stats[ids]))
        for part in (split, *paths):
            digest.update(f"{part}\0".encode())
        digest.update(labels[ids].tobytes())
    return Index(
        places=(path.name, *sorted({rows.paths[index].rpartition("/")[0] for index in there})),
        classes=classes,
        splits=files,
        table=digest.hexdigest(),
        missing=tuple(sorted(rows.paths[index] for index in missing)),
        ignored=rows.ignored,
        notes=rows.notes,
        mistake=mistakes.line("missing"),
    )


def _complete_paths(root: Path, rows: _Rows, mistakes: Mistakes) -> bool:
    """Complete the paths of the rows, none of which is a file as it is written, that are those of images below `root`
    without their folder, their suffix or both; return whether there is one. Raises UserError if one could mean several.
    """
    try:
        images = find_images(root).images
    except UserError:  # of a folder that may have nothing to do with the table
        return False
    by_name: dict[str, list[str]] = {}
    for image in images:
        name = image.rpartition("/")[2]
        for key in {name, name.rpartition(".")[0]}:
            by_name.setdefault(key, []).append(image)
    completed, example = False, ""
    row_of: dict[str, int] = {}
    for index, path in enumerate(rows.paths):
        endings = (f"/{path}", f"/{path}.")
        found = [
            image
            for image in by_name.get(path.rpartition("/")[2], ())
            if f"/{image}".endswith(endings[0]) or f"/{image.rpartition('.')[0]}.".endswith(endings[1])
        ]
        number = rows.numbers[index]
        if len(found) > 1:
            names = " or ".join(f"'{image}'" for image in found[:2])
            mistakes.add("several", number, f"'{path}' could be {names}; write the whole path.")
        elif found and found[0] in row_of:
            mistakes.add("twice", number, f"the image '{found[0]}' is also in row {row_of[found[0]]}; keep one row.")
        elif found:
            row_of[found[0]] = number
            example = example or f"'{path}' is {found[0]}"
            rows.paths[index], completed = found[0], True
    if completed:
        rows.notes += (f"{mistakes.path}: its paths are completed by what is there, for example {example}.",)
    mistakes.raise_all()
    return completed


def _read(path: Path, given: Mapping[str, str], mistakes: Mistakes) -> _Rows:
    """The rows, without the mistaken ones. Raises UserError if the columns are not clear."""
    lines = csv_rows(path)
    first, header = next(lines, (0, []))
    if not header:
        raise UserError(f"{path} is empty; its first row must name the columns, such as path,label.")
    where = f"{path}, row {first}"
    columns = columns_of(header, given, where)
    rows, folder = _Rows(), f"{path.parent.absolute().as_posix()}/"
    line_of: dict[str, int] = {}
    for number, cells in lines:
        if len(cells) != len(header):
            advice = "; put a cell that contains the separator in quotation marks" if len(cells) > len(header) else ""
            text = f"it has {len(cells)} cell{'s' * (len(cells) > 1)}, but the header has {len(header)}{advice}."
            mistakes.add("cells", number, text)
            continue
        values = {role: cells[column] for role, column in columns.items()}
        image = posixpath.normpath(values["path"]).removeprefix(folder)
        problem = _problem(values)
        if problem is None and image in line_of:
            problem = "twice", f"the image '{image}' is also in row {line_of[image]}; keep one of these rows."
        if problem is not None:
            mistakes.add(problem[0], number, problem[1])
            continue
        line_of[image] = number
        rows.numbers.append(number)
        rows.paths.append(image)
        rows.labels.append(sys.intern(values["label"]))  # one string, not a million
        rows.splits.append(SPLIT_NAMES[values["split"].lower()] if "split" in columns else "train")
    if not rows.numbers:
        mistakes.raise_all()
        raise UserError(f"{path} has a header, but no row with an image.")
    unused = [name for column, name in enumerate(header) if column not in columns.values()]
    rows.ignored = f"column{'s' * (len(unused) > 1)} {quoted(unused)}" if unused else ""
    rows.notes = unused_notes(unused, columns, where)
    return rows


def _problem(values: dict[str, str]) -> tuple[str, str] | None:
    """Kind and description of the first mistake in a row's cells, apart from its files; None: there is none."""
    path, split = values["path"], values.get("split", "train")
    for role, cell in values.items():
        if not cell.isprintable() and CONTROL.search(cell):
            return "control", f"the {role} has a line break or another control character: {cell!r}."
        if not cell and role == "label":
            advice = f"If images of this table have several labels or none, write {SEPARATOR} for none."
            return "empty label", f"the label is empty. {advice}"
        if not cell:
            return f"empty {role}", f"the {role} is empty."
    if path[1:3] in (":/", ":\\"):
        return "outside", f"the path '{path}' is one of Windows; write it relative to the table's folder, with /."
    if not path.startswith("/") and ".." in path and ".." in path.split("/"):
        return "outside", f"the path '{path}' leads outside the table's folder; move the table to a folder above."
    if split.lower() not in SPLIT_NAMES:
        hint = nearest(split.lower(), SPLIT_NAMES)
        return "split", f"unknown split '{split}'; expected train, val or test.{hint}"
    return None


def _labels(cells: Sequence[str]) -> tuple[tuple[str, ...], Labels]:
    """The classes, and the labels of all rows: int64 [n], or bool [n, classes] if any cell has a separator.

    Classes are sorted: by their numbers if all labels are whole numbers, else as text, as a folder's classes are.
    """
    several = any(SEPARATOR in cell for cell in cells)
    parts = {cell: [part.strip() for part in cell.split(SEPARATOR) if part.strip()] for cell in set(cells)}
    names = {name for found in parts.values() for name in found}
    if all(NUMBER.fullmatch(name) for name in names):
        spelt: dict[int, str] = {}
        for name in sorted(names):
            if spelt.setdefault(int(name), name) != name:
                raise UserError(
                    f"the labels '{spelt[int(name)]}' and '{name}' of the table are the same number, but two texts: "
                    "write one of them in all rows, or put a letter before the labels if they are two classes."
                )
        parts = {cell: [str(int(name)) for name in found] for cell, found in parts.items()}
        classes = tuple(map(str, sorted({int(name) for name in names})))
    else:
        classes = tuple(sorted(names))
    number = {name: label for label, name in enumerate(classes)}
    if not several:
        one = {cell: number[found[0]] for cell, found in parts.items()}
        return classes, np.array([one[cell] for cell in cells], dtype=np.int64)
    sets = {cell: [number[name] for name in found] for cell, found in parts.items()}
    matrix = np.zeros((len(cells), len(classes)), dtype=np.bool_)
    for index, cell in enumerate(cells):
        matrix[index, sets[cell]] = True
    return classes, matrix


def _check_training_classes(
    rows: _Rows, classes: Sequence[str], labels: Labels, is_train: npt.NDArray[np.bool_], mistakes: Mistakes
) -> None:
    """Add the rows with a class that no training image has. Raises UserError if there is no training image at all."""
    if not is_train.any():
        found = " and ".join(sorted(set(rows.splits)))
        raise UserError(
            f"{mistakes.path}: no row has the split train, only {found}. To evaluate a run on all images of a table, "
            "remove the column split and give --split train."
        )
    trained = labels[is_train]
    if labels.ndim == 2:
        untrained = labels & ~trained.any(0)
        number, is_untrained = untrained.argmax(1), untrained.any(1)
    else:
        number, is_untrained = labels, (np.bincount(trained, minlength=len(classes)) == 0)[labels]
    for index in np.flatnonzero(is_untrained):
        name, split = classes[number[index]], rows.splits[index]
        mistakes.add("class", rows.numbers[index], f"the class '{name}' of this {split} image has no training image.")


# Reads a CSV file row by row: which column is which, and the mistakes in its rows.


DELIMITERS = ",\t;"
"""The first of these that is in the header separates the cells: Excel writes ; where the comma is the decimal point."""
SHOWN = 5  # rows with the same mistake that are named
MAX_BYTES = 1 << 32  # some ten million rows
LONGEST = 500  # characters of a message: a cell may have a hundred thousand

COLUMNS = {
    "path": ("path", "file", "filename", "filepath", "image"),
    "label": ("label", "labels", "class", "target"),
    "split": ("split",),
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
            option = f"say which one with {OPTIONS[role]}, or " if role in OPTIONS and role not in given else ""
            raise UserError(
                f"{where}: the columns {quoted([header[column] for column in found])} could each be the {role}; "
                f"{option}keep one of these names."
            )
        if found:
            columns[role] = found[0]
        elif role in given:
            raise UserError(
                f"{where}: there is no column '{given[role]}' for the {role}; found {quoted(header)}."
                f"{nearest(given[role], header)}"
            )
        elif role in ("path", "label"):
            raise UserError(
                f"{where}: there is no column for the {role}; found {quoted(header)}, expected one of "
                f"{', '.join(names)} in the first row. Name it with {OPTIONS[role]}."
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
