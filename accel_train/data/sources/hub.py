"""Datasets of Hugging Face's hub: hfds/NAME, through its package `datasets`.

timm's dataset of them would be of no use: it replaces an unreadable image by the next one.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_train.config.schema import Data
from accel_train.data.sources.images import BYTES_OF_HEADERS, MAX_BYTES, EncodedImages, ImageError, read_image
from accel_train.data.sources.splits import Source, Splits, named_splits, numbered, splits_of_files
from accel_train.errors import UserError, first_of, nearest
from accel_train.user_code import short_name

TEXTS = ("string", "large_string")
BUILDERS = ("arrow", "imagefolder", "parquet", "webdataset")
"""Those of the package datasets that read images, and never run code (pandas reads pickles)."""
MOST_UNPACKED = 100
"""Bytes that a byte of a Parquet file may unpack to: drawings of two colours as bitmaps come to some 30."""


class HubImages(EncodedImages):
    """Images of a Hugging Face dataset on this machine's disk (Arrow files, mapped into memory)."""

    def __init__(self, label: str, images: Any, labels: torch.Tensor, data: Data) -> None:
        """`label`: names the split in messages; `images`: a datasets.Dataset of one column, of images that it does not
        decode; `labels`: int64 [n]."""
        super().__init__(labels, data)
        (self.column,) = images.column_names
        self.label, self.images = label, images

    def read(self, id: int) -> bytes:
        return _file_of(self.images[id][self.column])

    def name(self, id: int) -> str:
        return f"{self.label} image {id}"


def _file_of(image: dict[str, Any] | None) -> bytes:
    """The bytes of an image that a Hugging Face dataset does not decode. Raises OSError and ImageError."""
    if image is None:
        raise OSError("the dataset has a label but no image there")
    content: bytes = image["bytes"] or read_image(Path(image["path"]))
    if len(content) > MAX_BYTES:
        raise ImageError(f"it has {len(content):,} bytes, more than an image can have")
    return content


def hub(data: Data, folder: Path | None = None) -> Splits:
    """Load the dataset that `data.name` names: hfds/NAME. Raises UserError.

    `folder`: this node's copy of the files that `data.root` names.
    """
    if importlib.util.find_spec("datasets") is None:
        raise UserError(f"the data '{data.name}' needs the package datasets: pip install 'accel-train[datasets]'.")
    try:
        return _hugging_face(data, folder)
    except UserError:
        raise
    except Exception as error:  # they raise many kinds of errors: no such dataset, no network, no disk space, …
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the data '{data.name}' cannot be read: {why[:300]}") from error


def _hugging_face(data: Data, folder: Path | None) -> Splits:
    datasets: Any = importlib.import_module("datasets")
    if os.environ.get("RANK", "0") != "0":
        datasets.disable_progress_bars()
    name = data.name.partition("/")[2]
    where: dict[str, Any] = {"path": name, "cache_dir": str(data.root)}
    if name in BUILDERS:  # it reads the files in data.root, or the copy of them, beside which it converts them
        where = {"path": name, "data_dir": str(folder or data.root), "cache_dir": folder and str(folder / ".arrow")}
    made = datasets.load_dataset_builder(**where)
    builder = type(made).__module__.rpartition(".")[2]
    if builder == "parquet":
        listed = (file for files in made.config.data_files.values() for file in files)
        _check_unpacked(file for file in listed if Path(file).is_file())  # and not on the hub
    if builder not in BUILDERS:
        raise UserError(
            f"the data '{data.name}' would be read by the builder {builder} of datasets: expected one of images "
            f"({', '.join(BUILDERS)}); others may run code that is in the data."
        )
    named = named_splits(datasets.get_dataset_split_names(**where), data.name)
    tables = {split: datasets.load_dataset(split=stored, **where) for split, stored in named.items()}
    return splits_of_tables(data, tables, named)


def _check_unpacked(files: Iterable[str]) -> None:
    """Raise UserError for a Parquet file that says it unpacks to much more than it has: images hardly compress, but
    zeros do, and datasets would write them to the disk."""
    parquet: Any = importlib.import_module("pyarrow.parquet")
    for file in files:
        about, packed = parquet.read_metadata(file), Path(file).stat().st_size
        unpacked = sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))
        if unpacked > MOST_UNPACKED * packed + BYTES_OF_HEADERS:
            raise UserError(
                f"{file} has {packed:,} bytes and would unpack to {unpacked:,}, more than {MOST_UNPACKED} times as "
                "many, which no images do; remove it."
            )


def splits_of_tables(data: Data, tables: Mapping[str, Any], named: Mapping[str, str]) -> Splits:
    """The splits that Hugging Face's datasets are, of an image column and a label column each: split -> dataset.

    `named`: split -> what messages call it. Raises UserError.
    """
    datasets: Any = importlib.import_module("datasets")
    features = tables["train"].features or {}
    image_key = _column(data, "image", data.image_column, features, lambda kind: isinstance(kind, datasets.Image))
    label_key = _column(data, "label", data.label_column, features, _is_label)
    where = f"the data '{short_name('data.name', data.name)}'"
    classes: tuple[str, ...] | None = None  # the numbers of the labels
    if isinstance(features[label_key], datasets.ClassLabel):
        classes = tuple(features[label_key].names)
    elif features[label_key].dtype in TEXTS:
        classes = tuple(sorted({name for name in tables["train"].unique(label_key) if name is not None}))
    sources: dict[str, Source] = {}
    for split, table in tables.items():
        label = f"{short_name('data.name', data.name)} {named[split]}"
        column = table.select_columns([label_key])
        names = getattr((table.features or {}).get(label_key), "names", None)
        labels = _labels(column[:][label_key], names, classes, label)
        images = table.select_columns([image_key]).cast_column(image_key, datasets.Image(decode=False))
        source = HubImages(label, images, labels, data)
        if split == "train" or not bool((source.labels == -1).all()):  # the hub's mark for samples without a label
            sources[split] = source
    found = [source.labels for source in sources.values()]
    return splits_of_files(data, classes or numbered(where, found), sources)


def _labels(values: Sequence[Any], names: Sequence[str] | None, classes: Sequence[str] | None, where: str) -> Tensor:
    """The labels of a split as the numbers of the training split's `classes`, int64 [n]; -1 for none.

    `values`: numbers of the classes that this split `names` in an order of its own; or names themselves; or, where
    neither has names, numbers. Raises UserError for an image of a class that the training split lacks.
    """
    if classes is not None and names is not None and tuple(names) != tuple(classes):
        values = [None if x is None or x < 0 else names[x] for x in values]
    if any(isinstance(value, str) for value in values):
        number = {name: label for label, name in enumerate(classes or ())}
        lacking = sorted({value for value in values if value is not None and value not in number})
        if lacking:
            shown = first_of([repr(name) for name in lacking], 5)
            raise UserError(
                f"{where} has images of class {shown}, which the training split does not name "
                f"(it names {first_of([repr(name) for name in number], 5)}); remove them, or add them to both."
            )
        values = [None if value is None else number[value] for value in values]
    try:
        return torch.tensor([-1 if value is None else value for value in values], dtype=torch.int64)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{where} has labels that are not the numbers of classes ({error}).") from error


def _is_label(feature: Any) -> bool:
    """Whether a column has classes: as numbers, with names (ClassLabel has the dtype int64) or without, or as text."""
    dtype = str(getattr(feature, "dtype", ""))
    return dtype in TEXTS or dtype.startswith(("int", "uint"))


def _column(data: Data, what: str, given: str | None, features: Any, fits: Callable[[Any], bool]) -> str:
    """The name of the column of images or of labels: the one that is `given`, or the usual one. Raises UserError."""
    name = given or what
    if fits(features.get(name)):
        return name
    fitting = [str(each) for each, feature in features.items() if fits(feature)]
    raise UserError(
        f"the data '{data.name}' has no column {name!r} of {what}s; of {what}s are: {', '.join(fitting) or 'none'}."
        f"{nearest(name, fitting)} Name one with --data.{what}-column."
    )
