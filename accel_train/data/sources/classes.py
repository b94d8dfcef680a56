"""Which classes of a dataset are used, and in which order: --data.only-classes and --data.class-map."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from accel_train.config.schema import Data
from accel_train.data.sources.splits import Splits, subset
from accel_train.errors import UserError, first_of, nearest
from accel_train.untrusted import read_regular_file


def choose_classes(splits: Splits, data: Data) -> Splits:
    """The splits with the images of the classes that `data` names, which become the classes 0, 1, …

    An image with several labels stays, also if all of them are of other classes. Raises UserError.
    """
    if data.class_map is not None:
        file, option = data.class_map, f"--data.class-map {data.class_map}"
        if not file.is_file() and (data.root / file).is_file():  # as in timm
            file = data.root / file
        names = _names_in(file)
        if data.only_classes:
            raise UserError(f"{option}: it names the classes, as --data.only-classes does; give one of them.")
    elif data.only_classes:
        names, option = data.only_classes, "--data.only-classes"
    else:
        return splits
    if twice := sorted(name for name, times in Counter(names).items() if times > 1):
        raise UserError(f"{option}: names {first_of(list(map(repr, twice)))} twice.")
    notes = _check_known(names, splits.classes, option, is_list=data.class_map is not None)
    position = {name: label for label, name in enumerate(names)}
    new_labels = torch.tensor([position.get(name, -1) for name in splits.classes], dtype=torch.int64)
    changed: dict[str, Any] = {}
    for split, source in splits.sources.items():
        if source.labels.ndim == 2:
            labels = torch.zeros(len(source), len(names), dtype=torch.bool)
            labels[:, new_labels[new_labels >= 0]] = source.labels[:, new_labels >= 0]
            kept = torch.ones(len(source), dtype=torch.bool)
        else:
            labels = new_labels[source.labels]
            kept = labels >= 0
        changed[split] = subset(source, kept.numpy(), labels)
        if split == "train" and splits.train_weights is not None:
            changed["train_weights"] = splits.train_weights[kept]
    # A run that goes on compares this: the file may have other names by then.
    digest = hashlib.sha256(json.dumps([splits.table, names]).encode()).hexdigest()
    return replace(splits, classes=tuple(names), table=digest, notes=(*splits.notes, *notes), **changed)


def _check_known(names: Sequence[str], known: Sequence[str], option: str, *, is_list: bool) -> tuple[str, ...]:
    """Raise UserError if the data lacks one of the classes. `is_list`: they are a file's, which may have more than the
    data; then the result is a warning, and it is an error that the data has none of them."""
    there = set(known)
    unknown = [name for name in names if name not in there]
    if not unknown:
        return ()
    has = f"the data has the classes {first_of(list(map(repr, known)), 5)}"
    if not is_list or len(unknown) == len(names):
        raise UserError(f"{option}: there is no class {unknown[0]!r}.{nearest(unknown[0], known)} ({has})")
    return (f"{option}: of its {len(names)} classes, the data has no image of {first_of(unknown)}",)


def _names_in(file: Path) -> tuple[str, ...]:
    try:
        # Some editors begin a file with a mark (BOM), which is no part of the first name.
        lines = read_regular_file(file, follow=True).decode("utf-8-sig").rstrip().splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"--data.class-map {file}: expected a text file, with the name of a class a line.") from error
    except OSError as error:
        raise UserError(f"--data.class-map {file} cannot be read: {error.strerror or error}.") from error
    names = tuple(line.strip() for line in lines)
    if "" in names or not names:
        raise UserError(f"--data.class-map {file}: line {names.index('') + 1 if names else 1} is empty; remove it.")
    return names
