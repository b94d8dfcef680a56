"""The work of `accel-train shards`: write a dataset as WebDataset shards, which sources/files/webdataset.py reads."""

from __future__ import annotations

import hashlib
import json
import posixpath
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from accel_train.config.declaration import bytes_of
from accel_train.config.schema import Data
from accel_train.config.url import is_url
from accel_train.data.sources.arrays import ArraySource
from accel_train.data.sources.files.depth import range_text
from accel_train.data.sources.files.encoded import EncodedImages
from accel_train.data.sources.files.folder import is_image
from accel_train.data.sources.files.images import default_mean_std
from accel_train.data.sources.files.index import CHANGING, SETTLED_SECONDS
from accel_train.data.sources.files.tars import RAW_FORMAT
from accel_train.data.sources.files.webdataset import index_of
from accel_train.data.sources.load import Source, Splits, Subset, load_splits
from accel_train.data.sources.splits import names_root, sample_keys, unwrap_subset
from accel_train.data.tools.pool import Job, ProgressDisplay, in_processes
from accel_train.data.tools.shard_samples import pack
from accel_train.data.tools.shard_writer import FINISHED, ShardWriter, begin, finish, locked
from accel_train.errors import LOGGER, UserError
from accel_train.keyed import key, permuted
from accel_train.launch.process import available_cores

CHUNK = 16  # images of one job: those of a camera have some megabytes each, and several jobs wait for their turn
OF_FILES = ("folder", "csv", "tar", "wds")  # data that would find the shards among its own files
WORTH_A_PROCESS = 1000  # images to copy; to start one takes some seconds
SHORT_SIDE = 256
"""Of images that are made smaller, in pixels."""


@dataclass(frozen=True)
class ShardsResult:
    """A dataset that was written as shards."""

    folder: Path
    shards: int
    images: int
    bytes: int
    """Of the shards."""
    was_there: bool
    """Whether an earlier call had written all of them."""
    options: tuple[str, ...]
    """What a training needs so that it learns the same as from the original, such as "--data.name", "wds"."""


def write_shards(
    data: Data,
    output: Path,
    *,
    shard_size: str = "256MB",
    shard_samples: int | None = None,
    encoding: Literal["copy", "jpeg", "raw"] = "copy",
    short_side: int = SHORT_SIDE,
    keep_order: bool = False,
    seed: int = 0,
    processes: int | None = None,
    shows_progress: bool = False,
) -> ShardsResult:
    """Write the images, labels and splits of `data` into the folder `output`, which is new, empty or unfinished.

    A shard has at most `shard_size` (or one sample, if that is larger) and at most `shard_samples` images. `encoding`:
    "copy" copies files, and what is no file becomes PNG; "jpeg" and "raw" (pixels) make images smaller, to this
    `short_side`. `seed` decides how `data` is divided, as in a training, and the order of the samples, unless
    `keep_order`; raw ones keep the order of the data. `processes` read; None: as many as there are cores. Their number
    changes nothing: the same data and options give the same bytes, but those of PNG and JPEG may change with the
    version of Pillow. Raises UserError.
    """
    shard_bytes = bytes_of(shard_size)
    if not shard_bytes:
        raise UserError(f"shard_size: expected a size such as 256MB or 1GB, found {shard_size!r}.")
    if shard_samples is not None and shard_samples < 1:
        raise UserError(f"shard_samples: expected 1 or more, found {shard_samples}.")
    if is_url(output):
        raise UserError(f"{output}: shards are written into a folder of this machine; upload them from there.")
    if data.name.partition("/")[0] in OF_FILES and data.root.resolve() in (output.resolve(), *output.resolve().parents):
        raise UserError(f"{output} is in the data's own folder, which would have the shards, too; name one beside it.")
    splits = load_splits(replace(data, verify=True), seed)  # all images are read, so that to compare them costs little
    _warn(splits)
    sources = _ordered(splits, None if keep_order or encoding == "raw" else seed)
    keys = _keys(sources.values(), names_root(data))
    settings: list[Any] = [shard_bytes, shard_samples, splits.classes]
    if encoding != "copy":
        settings += [encoding, RAW_FORMAT, short_side, splits.channels, data.range]
    worth = WORTH_A_PROCESS if encoding == "copy" else CHUNK
    processes = min(processes or available_cores(), 1 + len(splits.train) // worth)
    advice = " Shards that are complete are kept, and the same command goes on behind them."
    with locked(output / f"{FINISHED}.lock", str(output), advice):
        shards, was_there = begin(output, _fingerprint(settings, sources, keys))
        if not was_there:
            with ShardWriter(output, shards, shard_bytes, shard_samples) as writer:
                _write(writer, sources, keys, processes, encoding, short_side, shows_progress=shows_progress)
            finish(output, shards, splits.classes)
    images, found = sum(map(len, sources.values())), _indexed(output)
    if found != images:
        raise UserError(f"{output}: {images:,} images were written, {found:,} are there. Delete it and start again.")
    total = sum(shard.bytes for shard in shards)
    return ShardsResult(output, len(shards), images, total, was_there, tuple(_options(splits, output, data, encoding)))


def _indexed(folder: Path) -> int:
    """Make the index of the shards in the folder, and return how many images they have. No index is kept of files that
    have just changed, so wait a moment."""
    data = Data(name="wds", root=folder)
    if (index := index_of(data, folder)).unkept == CHANGING:
        time.sleep(SETTLED_SECONDS + 0.5)
        index = index_of(data, folder)
    return len(index)


def _warn(splits: Splits) -> None:
    """Warn of what shards do not have."""
    for note in splits.notes:
        LOGGER.warning(note)
    if splits.train_weights is not None:
        LOGGER.warning("the weights of the samples are not written: shards have images and labels only.")
    if splits.ignored:
        LOGGER.info(f"Not used: {splits.ignored}.")


def _ordered(splits: Splits, seed: int | None) -> dict[str, Source]:
    """The samples of each split in the order in which they are written: shuffled, or with None in their own."""
    sources = {**splits.sources, "train": splits.to_train_on}
    for split, source in sources.items():
        held, ids = unwrap_subset(source)
        places = torch.arange(len(source))
        if seed is not None:
            places = permuted(places, len(source), key(seed, "shards", split))
        sources[split] = Subset(held, places if ids is None else ids[places])
    return sources


def _keys(sources: Iterable[Source], root: Path) -> list[list[str]]:
    """The key of each sample: the path of its image without the extension, or a number if not all have such a path.

    WebDataset's key of a file ends at the first dot of its name.
    """

    def key_of(name: str) -> str:
        folder, file = posixpath.split(name)
        hidden = any(part.startswith(".") for part in name.split("/"))
        return "" if hidden or not is_image(file) else posixpath.join(folder, file.rpartition(".")[0].replace(".", "_"))

    sources = list(sources)
    keys = [[key_of(name) for name in sample_keys(source, root)] for source in sources]
    if all(map(all, keys)) and len(set().union(*keys)) == sum(map(len, keys)):
        return keys
    return [[f"{number:09}" for number in range(len(source))] for source in sources]


def _fingerprint(settings: list[Any], sources: Mapping[str, Source], keys: list[list[str]]) -> str:
    """SHA-256 of what the shards depend on: settings, samples, labels, and the state (size, time) of image files."""
    digest = hashlib.sha256(json.dumps(settings).encode())
    for (split, source), own in zip(sources.items(), keys, strict=True):
        held, ids = unwrap_subset(source)
        assert ids is not None
        digest.update(f"\0{split}\0{len(source)}\0".encode() + ids.numpy().tobytes() + source.labels.numpy().tobytes())
        digest.update("\0".join(own).encode(errors="surrogateescape"))
        if isinstance(held, ArraySource):
            digest.update(held.pixels.numpy().tobytes())
        for state in held.states() if isinstance(held, EncodedImages) else ():
            digest.update(f"\0{state}".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _write(
    writer: ShardWriter,
    sources: Mapping[str, Source],
    keys: list[list[str]],
    processes: int,
    encoding: str,
    short_side: int,
    *,
    shows_progress: bool,
) -> None:
    """Write all samples that are not in a complete shard."""
    names, jobs, total = list(sources), list[Job](), sum(map(len, sources.values()))
    for number, (split, source) in enumerate(sources.items()):
        written = sum(shard.images for shard in writer.shards if shard.split == split)
        jobs += [(number, at, min(at + CHUNK, len(source))) for at in range(written, len(source), CHUNK)]
    done = total - sum(last - first for _, first, last in jobs)

    def keys_of(job: Job) -> tuple[list[str]]:
        number, first, last = job
        return (keys[number][first:last],)

    with ProgressDisplay("pack", total, done, quiet=not shows_progress) as shown:
        packed: Iterator[list[bytes]] = in_processes(
            pack, list(sources.values()), jobs, processes, encoding, short_side, of_job=keys_of
        )
        for (number, _, _), samples in zip(jobs, packed, strict=True):
            for sample in samples:
                writer.add(names[number], sample)
            shown.advance(len(samples))
        writer.complete()


def _options(splits: Splits, output: Path, data: Data, encoding: str) -> Iterator[str]:
    """What a training on the shards needs besides its recipe: of what is not files, one knows more about all images."""
    yield from ("--data.name", "wds", "--data.root", str(output))
    if splits.channels != Data().channels:
        yield from ("--data.channels", str(splits.channels))
    if data.range is not None:  # images with 8 bits stay as they are; those that are predicted later have the range
        yield from ("--data.range", *range_text(data.range).split())
    if splits.image_size is not None and encoding == "copy":
        yield from ("--model.image-size", str(splits.image_size), "--augment.resize", str(splits.image_size))
    if (splits.mean, splits.std) != default_mean_std(splits.channels):
        yield from ("--augment.mean", *map(str, splits.mean), "--augment.std", *map(str, splits.std))
