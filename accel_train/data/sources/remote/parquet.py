"""Images in Parquet files, as the hub keeps data sets: a column of images and one of labels.

The pages of a Parquet file are compressed, so an image in its middle cannot be read by itself. A file is unpacked once
into a tar file: the labels of all rows, then the images byte for byte, in the order of the rows.
"""

from __future__ import annotations

import importlib
import json
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from accel_train.data.sources.files.tars import END, packed
from accel_train.errors import UserError, first_of, nearest, reason_of

ABOUT = "about.json"
"""The first file in the tar file: what is in the Parquet file beside the images."""
ROWS, BUFFER = 16, 1 << 20
"""Images, and bytes of each column, that are in memory at a time, whatever the size of a row group."""


def pyarrow(name: str = "pyarrow") -> Any:
    """A module of pyarrow. Raises UserError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"--data.name parquet needs the package pyarrow ({reason_of(error)}): pip install 'accel-train[parquet]', "
            "and 'accel-train[remote]' for s3:// and https://."
        ) from error


def unpacked(file: Path, name: str, image: str | None, label: str | None) -> Iterator[Any]:
    """Yields the tar file of the images in a Parquet file, piece by piece, as bytes and buffers.

    `name`: of the file, in messages; `image`, `label`: the columns, None: those that fit. Raises UserError.
    """
    arrow, parquet = pyarrow(), pyarrow("pyarrow.parquet")
    try:
        options = {"pre_buffer": False, "buffer_size": BUFFER, "page_checksum_verification": True}
        with parquet.ParquetFile(arrow.OSFile(str(file)), **options) as table:
            image, label, classes = _columns(table.schema_arrow, name, image, label)
            labels = table.read([label]).column(label)
            if labels.null_count:
                raise _mistake(f"{name}: row {_first_null(labels)} has no label in the column '{label}'")
            about = {"columns": [image, label], "classes": classes, "labels": labels.to_pylist()}
            yield from packed(ABOUT, json.dumps(about).encode(), tarfile.USTAR_FORMAT)
            row = 0
            for batch in table.iter_batches(ROWS, columns=[image]):
                images = batch.column(0)
                if arrow.types.is_struct(images.type):
                    images = pyarrow("pyarrow.compute").struct_field(images, "bytes")
                if images.null_count:
                    raise _mistake(f"{name}: row {row + _first_null(images)} has no image in the column '{image}'")
                for value in images:
                    yield from packed(f"{row:06d}", value.as_buffer(), tarfile.USTAR_FORMAT)
                    row += 1
            if not row == len(labels) == table.metadata.num_rows:
                raise ValueError(f"{row:,} images and {len(labels):,} labels in {table.metadata.num_rows:,} rows")
    except (arrow.ArrowException, OSError, ValueError, EOFError) as error:
        raise _mistake(
            f"the Parquet file {name} cannot be read ({reason_of(error, 200)}): it is damaged or incomplete"
        ) from error
    yield END


def _mistake(text: str) -> UserError:
    return UserError(f"{text}.", every_process=False)


def _first_null(column: Any) -> int:
    position: int = column.is_null().index(True).as_py()
    return position


def _columns(schema: Any, name: str, image: str | None, label: str | None) -> tuple[str, str, list[str] | None]:
    """The columns of the images and of the labels, and the names of the classes if the file has them: those that are
    given, or have the usual name, or are the only ones that fit, as in hfds. Raises UserError."""
    types, features = pyarrow().types, _features(schema)

    def has_bytes(kind: Any) -> bool:
        if types.is_struct(kind):
            position = kind.get_field_index("bytes")
            return position >= 0 and has_bytes(kind.field(position).type)
        return bool(types.is_binary(kind) or types.is_large_binary(kind))

    def is_label(kind: Any) -> bool:
        kind = kind.value_type if types.is_dictionary(kind) else kind
        return bool(types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind))

    images = [field.name for field in schema if has_bytes(field.type)]
    marked = [each for each in images if features.get(each, {}).get("_type") == "Image"]
    found = _chosen(name, "image", image, images, marked, schema.names)
    labels = [field.name for field in schema if is_label(field.type) and field.name != found]
    marked = [each for each in labels if features.get(each, {}).get("_type") == "ClassLabel"]
    target = _chosen(name, "label", label, labels, marked, schema.names)
    return found, target, features.get(target, {}).get("names") if target in marked else None


def _chosen(
    name: str, kind: str, given: str | None, fitting: list[str], marked: list[str], known: Sequence[str]
) -> str:
    option = f"--data.{kind}-column"
    what = {"image": "images (bytes, or a struct of bytes and path)", "label": "labels (integers or strings)"}[kind]
    every = f"it has the columns {first_of(list(map(repr, known)), 8) or 'none'}"
    if given is not None and given not in fitting:
        raise _mistake(f"{option} {given}: {name} has no such column of {what}; {every}{nearest(given, fitting)}")
    candidates = marked or fitting
    if given is not None or kind in candidates:
        return given or kind
    if not candidates:
        raise _mistake(f"{name} has no column of {what}; {every}")
    if len(candidates) > 1:
        raise _mistake(f"{name} has several columns of {what}, {', '.join(candidates)}: name one with {option}")
    return candidates[0]


def _features(schema: Any) -> dict[str, Any]:
    """What Hugging Face's `datasets` says of each column; {}: the file is not of it."""
    try:
        found = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return {name: about for name, about in found.items() if isinstance(about, dict)}
