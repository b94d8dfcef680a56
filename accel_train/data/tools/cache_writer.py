"""The work of `accel-train cache-data`: preprocess the images of a dataset into one cache file (see sources/cache.py).

While it is written, the file is called .NAME.partial and has a journal, .NAME.journal: a line for every chunk of images
that the disk has. After a kill the same command goes on behind the last one.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shlex
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from accel_train.config.schema import Data
from accel_train.data.sources.cache import COLUMNS, FOOTER, FORMAT, MAGIC, MAGIC_2, CacheFile, Description
from accel_train.data.sources.files.depth import range_text
from accel_train.data.sources.files.encoded import EncodedImages, depth_notes
from accel_train.data.sources.load import Source, Splits, load_splits
from accel_train.data.sources.shared import StringArray
from accel_train.data.sources.splits import names_root, present_classes, sample_keys, unwrap_subset
from accel_train.data.sources.unreadable_list import list_for, write_list
from accel_train.data.tools.chunk import Chunk, encode
from accel_train.data.tools.output import locked
from accel_train.data.tools.pool import Job, ProgressDisplay, in_processes, jobs_of
from accel_train.errors import UserError, print_line
from accel_train.files import atomic_write, fsync

SHOWN = 10  # unreadable images that are printed with their reason
SYNC_SECONDS = 10.0  # at most so much work is lost if the process is killed


def write_cache(data: Data, output: Path, *, short_side: int, encoding: str, processes: int) -> int:
    """Write all images of `data`, with a short side of at most `short_side` pixels, into the file `output`.

    `encoding`: "raw" or "jpeg". Every image is tried; if some cannot be read, and `data.skip_unreadable` does not list
    them, they are listed in `output`.unreadable.txt, the file stays partial and their number is returned. Raises
    UserError.
    """
    whole = replace(data, skip_unreadable=None, val_fraction=0.0, test_fraction=0.0, train_limit=None, test_limit=None)
    whole = replace(whole, only_classes=())
    whole = replace(whole, verify=True)  # all images are read, so that to compare them with their index costs little
    splits = load_splits(whole, seed=0)
    sources = {split: unwrap_subset(source)[0] for split, source in splits.sources.items()}
    if not isinstance(splits.train, EncodedImages):
        raise UserError(f"the images of '{data.name}' are not files: there is nothing to cache.")
    listed = list_for(data, splits.sources.values()).paths if data.skip_unreadable is not None else set()
    described = Description(
        encoding,
        short_side,
        splits.channels,
        splits.classes,
        splits.mean,
        splits.std,
        {split: len(source) for split, source in sources.items()},
        _fingerprint(splits, sources, names_root(data), short_side, encoding),
        FORMAT,
        splits.value_range,
    )
    for note in (*splits.notes, *depth_notes(splits.train)):
        print_line(f"warning: {note}")
    if splits.ignored:
        print_line(f"Not used: {splits.ignored}.")
    with locked(output.with_name(f".{output.name}.lock"), f"--output {output}"):
        weights = None if splits.train_weights is None else splits.train_weights.numpy()
        return _write(data, output, list(sources.values()), weights, described, listed, processes)


def _write(
    data: Data,
    output: Path,
    sources: list[Source],
    weights: npt.NDArray[np.float64] | None,
    described: Description,
    listed: set[str],
    processes: int,
) -> int:
    if output.exists():
        if output.is_dir():
            raise UserError(f"--output {output} is a folder: name a file.")
        if CacheFile(output).description.fingerprint != described.fingerprint:
            raise UserError(f"--output {output} exists, with other images or settings: delete it or name another file.")
        print_line(f"{output} is complete: nothing is left to do.")
        return 0
    partial, journal = (output.with_name(f".{output.name}.{suffix}") for suffix in ("partial", "journal"))
    jobs = jobs_of(sources)
    chunks = _begin(partial, journal, described.fingerprint)
    done, total = sum(last - first for _, first, last in jobs[: len(chunks)]), sum(map(len, sources))
    unreadable = [bad for chunk in chunks for bad in chunk.unreadable]
    with (
        partial.open("ab") as images,
        journal.open("a", encoding="utf-8") as lines,
        ProgressDisplay("cach", total, done) as shown,
    ):
        for chunk in _encoded(sources, jobs[len(chunks) :], described, processes, images, lines):
            chunks.append(chunk)
            unreadable += chunk.unreadable
            shown.advance(len(chunk.sizes), len(unreadable))

    root = names_root(data)
    keys = [name.removeprefix(f"{root}/") for name, _ in unreadable]
    if bad := sum(key not in listed for key in keys):
        list_path = output.with_name(f"{output.name}.unreadable.txt")
        write_list(list_path, data, sources, keys)
        for name, why in sorted(unreadable)[:SHOWN]:
            print_line(f"  {name}: {why}")
        if len(unreadable) > SHOWN:
            print_line(f"  … and {len(unreadable) - SHOWN} more.")
        print_line(
            f"{len(unreadable)} of {total} images cannot be read. They are listed in {list_path}. The finished part is "
            f"kept. Continue with the same command and\n  --skip-unreadable {shlex.quote(str(list_path))}"
        )
        return bad

    _finish(partial, chunks, sources, weights, root, described, listed)
    _verify(partial)
    partial.replace(output)
    fsync(output.parent)
    journal.unlink()
    cached = CacheFile(output)
    count = int((cached.columns["sizes"] > 0).sum())
    print_line(f"{count} images, {cached.bytes / 1e9:.3f} GB: {output}. Train on it with")
    print_line(f"  accel-train train RECIPE --data.name cache --data.root {shlex.quote(str(output))}", wraps=False)
    return 0


def _fingerprint(splits: Splits, sources: dict[str, Source], root: Path, short_side: int, encoding: str) -> str:
    """SHA-256 of what the cache depends on: settings, and names, labels and state (size, time) of the images."""
    digest = hashlib.sha256(json.dumps([MAGIC.decode(), FORMAT, short_side, encoding, splits.channels]).encode())
    digest.update(json.dumps(splits.classes).encode())
    if splits.train_weights is not None:
        digest.update(splits.train_weights.numpy().tobytes())
    if splits.value_range is not None:
        digest.update(f"range {range_text(splits.value_range)}".encode())
    for split, source in sources.items():
        assert isinstance(source, EncodedImages)
        digest.update(f"\0{split}\0{len(source)}\0".encode())
        digest.update(source.labels.numpy().tobytes())
        for name in sample_keys(source, root):
            digest.update(f"{name}\0".encode(errors="surrogateescape"))
        for state in source.states():
            digest.update(f"{state}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _begin(partial: Path, journal: Path, fingerprint: str) -> list[Chunk]:
    """Return the chunks that an earlier start has written; what follows them in the file is removed."""
    chunks: list[Chunk] = []
    with contextlib.suppress(FileNotFoundError):
        lines = journal.read_text(encoding="utf-8").splitlines()
        if lines and lines[0] != fingerprint:
            print_line("The images or the settings have changed since the last start: starting over.")
        elif lines:
            size = partial.stat().st_size
            written = len(MAGIC)
            for line in lines[1:]:
                try:
                    chunk = Chunk(b"", *json.loads(line))
                except (ValueError, TypeError):  # a line that was not written to its end
                    break
                if written + sum(chunk.sizes) > size:
                    break
                written += sum(chunk.sizes)
                chunks.append(chunk)
            os.truncate(partial, written)
    if not chunks:
        partial.write_bytes(MAGIC)
    else:
        print_line(f"continuing after {sum(len(chunk.sizes) for chunk in chunks)} images")
    kept = "".join(_line(chunk) for chunk in chunks)
    atomic_write(journal, f"{fingerprint}\n{kept}")
    return chunks


def _line(chunk: Chunk) -> str:
    fields = [chunk.sizes, chunk.heights, chunk.widths, chunk.checksums, chunk.unreadable]
    return json.dumps(fields) + "\n"  # ASCII: names that are not valid text are written as escapes


def _encoded(
    sources: list[Source], jobs: list[Job], described: Description, processes: int, images: BinaryIO, lines: Any
) -> Iterator[Chunk]:
    """Encode and write the other images; a chunk is recorded in the journal once its images are on the disk."""
    waiting: list[str] = []
    last = time.monotonic()

    def note() -> None:
        images.flush()
        os.fsync(images.fileno())
        lines.writelines(waiting)
        lines.flush()
        waiting.clear()

    for chunk in in_processes(encode, sources, jobs, processes, described.short_side, described.encoding):
        images.write(chunk.data)
        chunk.data = b""
        waiting.append(_line(chunk))
        if time.monotonic() - last > SYNC_SECONDS:
            note()
            last = time.monotonic()
        yield chunk
    note()


def _finish(
    partial: Path,
    chunks: list[Chunk],
    sources: list[Source],
    weights: npt.NDArray[np.float64] | None,
    root: Path,
    described: Description,
    listed: set[str],
) -> None:
    """Append the index, in which the listed images have no bytes, and the footer."""
    lists = {name: [value for chunk in chunks for value in getattr(chunk, name)] for name in COLUMNS[1:-1]}
    columns: dict[str, npt.NDArray[Any]] = {name: np.array(values, dtype=np.int64) for name, values in lists.items()}
    columns["offsets"] = len(MAGIC) + np.cumsum(columns["sizes"]) - columns["sizes"]
    labels = torch.cat([source.labels for source in sources])
    columns["labels"] = labels.numpy() if labels.ndim == 1 else np.packbits(labels.numpy(), axis=1)
    names = [name for source in sources for name in sample_keys(source, root)]
    kept = np.array([size > 0 and name not in listed for size, name in zip(columns["sizes"], names, strict=True)])
    train = sources[0].labels
    lost = present_classes(train) - present_classes(train[torch.from_numpy(kept[: len(train)])])
    if lost:
        which = ", ".join(repr(described.classes[label]) for label in sorted(lost))
        raise UserError(f"--skip-unreadable leaves no training image of class {which}.")
    for name in ("sizes", "checksums"):  # of nothing
        columns[name][~kept] = 0
    packed = StringArray(names)
    optional = {} if weights is None else {"weights": weights}
    index = io.BytesIO()
    description = {name: value for name, value in asdict(described).items() if name != "range" or value is not None}
    np.savez(
        index,
        description=np.frombuffer(json.dumps(description).encode(), dtype=np.uint8),
        names=packed.text,
        name_ends=packed.ends,
        **optional,  # type: ignore[arg-type]
        **columns,  # type: ignore[arg-type]
    )
    content = index.getvalue()
    magic = MAGIC_2 if optional or labels.ndim == 2 else MAGIC
    with partial.open("ab") as file:
        at = file.tell()
        file.write(content)
        file.write(FOOTER.pack(magic, at, len(content), hashlib.sha256(content).digest()))
        file.flush()
        os.fsync(file.fileno())


def _verify(partial: Path) -> None:
    """Read the whole file back. Raises UserError if it differs from what was written."""
    cached = CacheFile(partial)
    for number, checksum in enumerate(cached.columns["checksums"]):
        if zlib.crc32(cached.at(number)) != checksum:
            raise UserError(
                f"{partial} is altered: {cached.names[number]} differs from what was written. Check the disk, delete "
                "the file and start again."
            )
