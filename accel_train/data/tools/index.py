"""The work of `accel-train index`: make the index of a data set before the first training."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from accel_train.config.schema import Data
from accel_train.data.sources.files import folder, table, tars, webdataset
from accel_train.data.sources.files.index import CHANGING, SETTLED_SECONDS
from accel_train.data.sources.files.index_file import Index
from accel_train.data.sources.remote import remote_index
from accel_train.errors import UserError

KINDS = {
    "folder": folder.index_of,
    "csv": table.index_of,
    "tar": tars.index_of,
    "wds": webdataset.index_of,
    "parquet": remote_index.index_of,
}


@dataclass(frozen=True)
class IndexResult:
    """An index that is ready for all trainings on this data."""

    file: Path
    images: int
    classes: int
    seconds: float
    """That it took."""
    was_there: bool
    """Whether there was one, and the data has not changed since."""


def make_index(data: Data) -> IndexResult:
    """Make the index of `data`, unless it is there; with `data.verify` in any case. Raises UserError.

    Data that has just been written is waited for, and looked at again.
    """
    index_of = KINDS.get("wds" if data.name.startswith("wds/") else data.name)
    if index_of is None:
        raise UserError(
            f"'{data.name}' needs no index; these do: folder (images in folders), csv (a table of images), "
            "tar (tar files), wds (WebDataset shards), parquet (Parquet files)."
        )
    if data.is_remote:
        index_of = remote_index.index_of
    began = time.perf_counter()
    index: Index = index_of(data)
    if index.unkept == CHANGING:
        time.sleep(SETTLED_SECONDS + 0.5)
        index = index_of(data)
    if index.mistake:
        raise UserError(index.mistake)
    if index.file is None:
        raise UserError(
            f"{data.root}: there is no index, because {index.unkept}. Each start looks through the data again.", code=1
        )
    seconds = time.perf_counter() - began
    return IndexResult(index.file, len(index), len(index.classes), seconds, index.was_there)
