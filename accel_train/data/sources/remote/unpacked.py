"""The copies of Parquet files on this node, unpacked (see parquet.py), and their index."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accel_train.config.schema import Data
from accel_train.data.sources.files.index import Progress
from accel_train.data.sources.files.index_file import Index
from accel_train.data.sources.files.tars import Member, index_of_members, members_of
from accel_train.data.sources.files.webdataset import named_shards
from accel_train.data.sources.remote.parquet import ABOUT, unpacked
from accel_train.data.sources.remote.shard_cache import ShardCache
from accel_train.data.sources.remote.storage import Shard, Storage
from accel_train.data.sources.splits import SPLIT_NAMES, numbered
from accel_train.errors import UserError, counted, first_of

FORMAT = "1"
"""To be raised when `unpacked` writes other bytes for the same file."""
NOT_LABELLED = -1
"""The hub's label of samples without one."""
OF_THE_HUB = re.compile(r"(?:.*/)?([^/]+?)-\d+-of-\d+(?:-[0-9a-f]+)?\.parquet")
"""SPLIT-00000-of-00040.parquet; older ones end with a hash."""


class UnpackedCache(ShardCache):
    """The copies of Parquet files are tar files. Their sizes are known from the index, or when they are made."""

    def __init__(self, data: Data, storage: Storage) -> None:
        super().__init__(data, storage)
        self.columns = data.image_column, data.label_column
        self.sizes: dict[str, int] = {}
        """Bytes of the copies that the index knows, by the names of the shards."""

    @property
    def is_local(self) -> bool:
        return "://" not in self.storage.folder

    @property
    def beside(self) -> int:
        return 0 if self.is_local else max(shard.size for shard in self.shards.values())

    def path(self, name: str) -> Path:
        shard = self.shards[name]
        key = f"{FORMAT}\n{shard.name}\n{shard.state}\n{json.dumps(self.columns)}"
        file = (name or self.storage.folder).rpartition("/")[2]
        return self.folder / f"{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:16]}-{file}.tar"

    def size_of(self, name: str) -> int | None:
        return self.sizes.get(name)

    def write(self, shard: Shard, part: Path, worth: float | None) -> bool:
        """Unpack the file, from where it is or from a download beside the copy."""
        known, url = self.size_of(shard.name), self.storage.url(shard.name)
        download = part.with_name(f"{part.name.removesuffix('.part')}.download.part")
        room = known or shard.size
        if not self.reserve(shard, {part: room} | ({} if self.is_local else {download: shard.size}), worth):
            return False
        try:
            if not self.is_local:
                self.storage.download(shard, download)
            size = 0
            with part.open("r+b") as copy:
                for piece in unpacked(Path(url) if self.is_local else download, url, *self.columns):
                    size += len(piece)
                    if size > room:
                        room = size + shard.size // 16
                        self.reserve(shard, {part: room}, None)
                    copy.write(piece)
                copy.truncate(size)
            if self.is_local:
                self.storage.check_unchanged(shard)
        finally:
            download.unlink(missing_ok=True)
        if known is not None and size != known:
            raise UserError(
                f"{url}: unpacked it has {size:,} bytes, but {known:,} by the index; remove the index "
                f"beside it, or {self.folder}.",
                every_process=False,
            )
        return True


def sizes_of(index: Index) -> dict[str, int]:
    """The bytes of the unpacked files in the index, by the names of the Parquet files."""
    ends = np.zeros(len(index.tars), dtype=np.int64)
    for files in index.splits.values():
        assert files.positions is not None
        tars, offsets, sizes = files.positions.array.T
        np.maximum.at(ends, tars, offsets + sizes)
    block = tarfile.BLOCKSIZE
    return dict(zip(index.tars, (-(-ends // block) * block + 2 * block).tolist(), strict=True))


Found = tuple[list[Member], dict[str, Any]]
"""What is in an unpacked file: its images, and the content of ABOUT."""


def labelled_in(root: Path, shard: str, copy: Path) -> Found:
    """The images of the Parquet file `root / shard`, of which `copy` was unpacked, and their labels. Raises
    UserError."""
    about: dict[str, Any] = {}
    members = []
    for member, content in members_of(root, shard, copy):
        if member.name == ABOUT:
            about = json.loads(content.read())
        else:
            members.append(member)
    return members, about


def index_of_parquet(
    root: Path,
    files: Sequence[str],
    look: Callable[[Sequence[str]], Iterable[Found]],
    progress: Progress,
    *,
    named: bool,
) -> Index:
    """The index of Parquet files; `look` calls `labelled_in` for each of several. `named`: whether the user has named
    the files. Raises UserError."""
    splits, others = files_of_splits(root, files, named=named)
    samples: dict[str, tuple[list[Member], list[Any]]] = {}
    first, facts = "", dict[str, Any]()
    for split, shards in splits.items():
        members, labels = samples.setdefault(split, ([], []))
        for shard, (found, about) in zip(shards, look(shards), strict=True):
            members += found
            labels += about.pop("labels")
            progress.images += len(found)
            first, facts = first or shard, facts or about
            if about != facts:
                raise UserError(
                    f"{root}: {shard} has other columns or other names of classes than {first}; all files of a data "
                    "set have the same."
                )
    classes, numbers = _numbers(root, {split: labels for split, (_, labels) in samples.items()}, facts["classes"])
    index = index_of_members(files, classes, {split: (samples[split][0], numbers[split]) for split in numbers})
    return replace(index, ignored=f"{counted(len(others), 'Parquet file')}, such as {others[0]}" if others else "")


def _numbers(
    root: Path, labels: dict[str, list[Any]], names: list[str] | None
) -> tuple[tuple[str, ...], dict[str, torch.Tensor]]:
    """The names of the classes, and the labels of each split as int64 [n]. Raises UserError."""
    is_text = any(isinstance(label, str) for each in labels.values() for label in each[:1])
    if is_text:
        names = sorted({label for each in labels.values() for label in each})
        number = {name: label for label, name in enumerate(names)}
        labels = {split: [number[label] for label in each] for split, each in labels.items()}
    try:
        numbers = {split: torch.tensor(each, dtype=torch.int64) for split, each in labels.items()}
    except (OverflowError, RuntimeError, ValueError) as error:
        raise UserError(f"{root}: its labels are larger than the number of any class.") from error
    numbers = {
        split: each for split, each in numbers.items() if split == "train" or not bool((each == NOT_LABELLED).all())
    }
    return tuple(names or numbered(str(root), list(numbers.values()))), numbers


def files_of_splits(root: Path, files: Sequence[str], *, named: bool) -> tuple[dict[str, list[str]], list[str]]:
    """split -> its files, by their names, and the files of other splits. Parameters as above. Raises UserError."""
    of_hub = {file: match[1] for file in files if (match := OF_THE_HUB.fullmatch(file))}
    others = {file: None for file, split in of_hub.items() if split.lower() not in SPLIT_NAMES}
    used = [file for file in files if file not in others]
    splits = named_shards(root, used)
    if "train" not in splits:
        raise UserError(
            f"--data.root {root}: there is no Parquet file of a train split, such as train-00000-of-00001.parquet; "
            f"found {first_of(list(files))}."
        )
    folders = {
        "/".join(part for part in posixpath.dirname(file).split("/") if part.lower() not in SPLIT_NAMES)
        for file in used
    }
    if len(folders) > 1 and not named:
        raise UserError(
            f"--data.root {root}: its Parquet files are in {len(folders)} folders, as those of several configurations "
            f"on the hub ({first_of(sorted(folder or '.' for folder in folders))}): give the folder of one."
        )
    return splits, list(others)
