"""The work of `accel-train shards`: write a dataset as WebDataset shards, which sources/webdataset.py reads.

They are written into a folder beside OUTPUT, read back, and then this folder gets OUTPUT's name: so OUTPUT is complete
or absent. A sample is two files of a tar file, KEY.jpg and KEY.cls.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import posixpath
import shutil
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from accel_train.config.declaration import bytes_of
from accel_train.config.schema import Data
from accel_train.config.url import is_url
from accel_train.data.image_transform import resized_to_short_side
from accel_train.data.sources.folder import is_image
from accel_train.data.sources.images import EncodedImages, ImageError, default_mean_std, to_image
from accel_train.data.sources.load import Source, Splits, Subset, load_splits
from accel_train.data.sources.splits import label_numbers, names_root, sample_keys, unwrap_subset
from accel_train.data.sources.tars import END, RAW_EXTENSIONS, raw_file
from accel_train.data.sources.webdataset import SEPARATOR, index_of
from accel_train.data.worker_processes import on_all_cores
from accel_train.errors import LOGGER, UserError
from accel_train.files import atomic_write, fsync, sha256
from accel_train.keyed import key, permuted
from accel_train.launch.process import available_cores
from accel_train.tools.pool import in_processes, jobs_of, progress_bar

CHUNK = 16  # images of one job: those of a camera have some megabytes each, and several jobs wait for their turn
OF_FILES = ("folder", "csv", "wds")  # data that would find the shards among its own files
WORTH_A_PROCESS = 1000  # images to copy; to start one takes some seconds
SHORT_SIDE = 256
"""Of images that are made smaller, in pixels."""
JPEG_QUALITY = 90
SETTLED_SECONDS = 60.0  # the age that the shards get: no index is kept of files that may be changing
FORMATS = {b"\xff\xd8\xff": ".jpg", b"\x89PNG\r\n\x1a\n": ".png", b"GIF8": ".gif", b"BM": ".bmp", b"II*\0": ".tif"}
"""First bytes of a file -> its extension. A dataset of a hub may have no names; and WebDataset's readers, which know
images by their extension, mostly know .jpg but not .JPEG."""


@dataclass(frozen=True)
class ShardsResult:
    """A dataset that was written as shards."""

    folder: Path
    shards: int
    images: int
    bytes: int
    """Of the shards."""
    options: tuple[str, ...]
    """What a training needs so that it learns the same as from the original, such as "--data.name", "wds"."""


def write_shards(
    data: Data,
    output: Path,
    *,
    shard_size: str = "256MB",
    encoding: Literal["copy", "jpeg", "raw"] = "copy",
    short_side: int = SHORT_SIDE,
    keep_order: bool = False,
    seed: int = 0,
    processes: int | None = None,
    shows_progress: bool = False,
) -> ShardsResult:
    """Write the images, labels and splits of `data` into the folder `output`, which must be new or empty.

    A shard has at most `shard_size`, or one sample, if that is larger. `encoding`: "copy" copies files, and what is no
    file becomes PNG; "jpeg" and "raw" (pixels) make images smaller, to this `short_side`. `seed` decides how `data` is
    divided, as in a training, and the order of the samples, unless `keep_order`; raw ones keep the order of the data.
    `processes` read; None: as many as there are cores. Their number changes nothing: the same data and options give the
    same bytes, but those of PNG and JPEG may change with the version of Pillow. Raises UserError.
    """
    shard_bytes = bytes_of(shard_size)
    if not shard_bytes:
        raise UserError(f"shard_size: expected a size such as 256MB or 1GB, found {shard_size!r}.")
    if is_url(output):
        raise UserError(f"{output}: shards are written into a folder of this machine; upload them from there.")
    if data.name.partition("/")[0] in OF_FILES and data.root.resolve() in (output.resolve(), *output.resolve().parents):
        raise UserError(f"{output} is in the data's own folder, which would have the shards, too; name one beside it.")
    splits = load_splits(data, seed)
    for note in splits.notes:
        LOGGER.warning(note)
    if splits.ignored:
        LOGGER.info(f"Not used: {splits.ignored}.")
    sources = _ordered(splits, None if keep_order or encoding == "raw" else seed)
    keys = _keys(sources.values(), names_root(data))
    worth = WORTH_A_PROCESS if encoding == "copy" else CHUNK
    processes = min(processes or available_cores(), 1 + len(splits.train) // worth)
    partial = output.absolute().with_name(f".{output.absolute().name}.accel-train-shards")
    lock = FileLock(f"{partial}.lock", timeout=0)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with lock:
            try:
                if output.exists() and (there := sorted(path.name for path in output.iterdir())):
                    raise UserError(f"{output} is not empty (found {there[0]}); name a new or an empty folder.")
                shutil.rmtree(partial, ignore_errors=True)  # of a command that was killed
                partial.mkdir()
                writer = ShardWriter(partial, shard_bytes)
                _write(writer, sources, keys, processes, encoding, short_side, shows_progress=shows_progress)
                _finish(partial, writer.shards, splits.classes)
                partial.replace(output)
                fsync(output.parent)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
                Path(lock.lock_file).unlink(missing_ok=True)
    except Timeout:
        raise UserError(f"{output}: another process is writing it.") from None
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{output} cannot be written, by way of {partial.name} beside it: {reason}.") from error
    images, found = sum(map(len, sources.values())), len(index_of(Data(name="wds", root=output), output))
    if found != images:
        raise UserError(f"{output}: {images:,} images were written, {found:,} are there. Delete it and start again.")
    total = sum(shard.bytes for shard in writer.shards)
    return ShardsResult(output, len(writer.shards), images, total, tuple(_options(splits, output, data, encoding)))


def _ordered(splits: Splits, seed: int | None) -> dict[str, Source]:
    """The samples of each split in the order in which they are written: shuffled, or with None in their own."""
    sources = {**splits.sources, "train": splits.to_train_on}
    if seed is None:
        return sources
    for split, source in sources.items():
        held, ids = unwrap_subset(source)
        places = permuted(torch.arange(len(source)), len(source), key(seed, "shards", split))
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
    """Write all samples."""
    splits, jobs = list(sources), jobs_of(list(sources.values()), CHUNK)
    work = [(number, first, last, keys[number][first:last]) for number, first, last in jobs]
    with progress_bar("packing", sum(map(len, keys)), shows_progress=shows_progress) as advance:
        packed: Iterator[list[bytes]] = in_processes(
            pack, list(sources.values()), work, processes, encoding, short_side
        )
        for (number, *_), samples in zip(jobs, packed, strict=True):
            for sample in samples:
                writer.add(splits[number], sample)
            advance(len(samples))
    writer.complete()


@dataclass(frozen=True)
class Shard:
    """A complete shard."""

    name: str
    split: str
    images: int
    bytes: int
    sha256: str


class ShardWriter:
    """Writes samples one after the other into the shards of a folder. Its methods raise OSError."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        self.shards: list[Shard] = []
        """Those that are complete."""
        self.file: IO[bytes] | None = None
        """That of the next one."""
        self.split, self.images, self.size, self.digest = "", 0, 0, hashlib.sha256()

    def add(self, split: str, sample: bytes) -> None:
        if split != self.split or self.size + len(sample) + len(END) > self.most_bytes:
            self.complete()
        if self.file is None:
            number = sum(shard.split == split for shard in self.shards)
            self.file = (self.folder / f"{split}-{number:06}.tar").open("xb")
            self.split, self.images, self.size, self.digest = split, 0, 0, hashlib.sha256()
        self.images += 1
        self._put(self.file, sample)

    def _put(self, file: IO[bytes], content: bytes) -> None:
        file.write(content)
        self.digest.update(content)
        self.size += len(content)

    def complete(self) -> None:
        """End the shard, if one was begun."""
        if self.file is None:
            return
        with self.file as file:
            self._put(file, END)
            file.flush()
            os.fsync(file.fileno())
        name = Path(file.name).name
        self.shards.append(Shard(name, self.split, self.images, self.size, self.digest.hexdigest()))
        self.file = None


def _finish(folder: Path, shards: Sequence[Shard], classes: tuple[str, ...]) -> None:
    """Write what is known of all shards, and read them back. Raises UserError and OSError."""
    splits = {}
    for split, group in itertools.groupby(shards, lambda shard: shard.split):
        own = list(group)
        lengths = [shard.images for shard in own]
        splits[split] = {
            "name": split,
            "num_samples": sum(lengths),
            "filenames": [shard.name for shard in own],
            "shard_lengths": lengths,
        }
    atomic_write(folder / "_info.json", json.dumps({"splits": splits, "classes": classes}, indent=1) + "\n")
    atomic_write(folder / "SHA256SUMS", "".join(f"{shard.sha256}  {shard.name}\n" for shard in shards))
    for shard, found in zip(shards, on_all_cores(sha256, [folder / shard.name for shard in shards]), strict=True):
        if found != shard.sha256:
            raise UserError(f"{folder / shard.name} differs from what was written: check the disk, and start again.")
    settled = time.time() - SETTLED_SECONDS
    for path in folder.iterdir():
        os.utime(path, (settled, settled))
    fsync(folder)


def _options(splits: Splits, output: Path, data: Data, encoding: str) -> Iterator[str]:
    """What a training on the shards needs besides its recipe: of what is not files, one knows more about all images."""
    yield from ("--data.name", "wds", "--data.root", str(output))
    if splits.channels != Data().channels:
        yield from ("--data.channels", str(splits.channels))
    if splits.image_size is not None and encoding == "copy":
        yield from ("--model.image-size", str(splits.image_size), "--augment.resize", str(splits.image_size))
    if (splits.mean, splits.std) != default_mean_std(splits.channels):
        yield from ("--augment.mean", *map(str, splits.mean), "--augment.std", *map(str, splits.std))


# In each process


def pack(source: Source, first: int, last: int, keys: Sequence[str], encoding: str, short_side: int) -> list[bytes]:
    """Samples first..last-1 as parts of a tar file, with these keys. Raises UserError if one cannot be read.

    `encoding`: "copy" writes the images' own files, "jpeg" and "raw" their pixels, with at most this `short_side`.
    """
    held, ids = unwrap_subset(source)
    samples = []
    for name, id in zip(keys, range(first, last), strict=True):
        number = id if ids is None else int(ids[id])
        content, extension = _copy(held, number) if encoding == "copy" else _encoded(held, number, encoding, short_side)
        own = source.labels[id]
        text = str(int(own)) if own.ndim == 0 else f"{SEPARATOR.join(map(str, label_numbers(own)))}{SEPARATOR}"
        samples.append(_in_tar(f"{name}{extension}", content) + _in_tar(f"{name}.cls", text.encode()))
    return samples


def _in_tar(name: str, content: bytes) -> bytes:
    """A file in a tar file: a header without owner and time, so that the same samples are the same bytes, the content,
    and zeros up to a whole number of blocks."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    header = info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    return b"".join([header, content, bytes(-len(content) % tarfile.BLOCKSIZE)])


def _copy(source: Source, id: int) -> tuple[bytes, str]:
    """The file of an image, and its extension: the encoded image as it is, or else its pixels as PNG."""
    if not isinstance(source, EncodedImages):
        return _file(_pixels(source, id), "PNG"), ".png"
    try:
        content = source.read(id)
    except (OSError, ImageError) as error:
        raise source.unreadable(id, error) from error
    usual = (extension for start, extension in FORMATS.items() if content.startswith(start))
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return content, ".webp"
    return content, next(usual, posixpath.splitext(source.name(id))[1].lower())


def _encoded(source: Source, id: int, encoding: str, short_side: int) -> tuple[bytes, str]:
    """The file of an image's pixels, which are made smaller but never larger, and its extension."""
    pixels = _pixels(source, id)
    if min(pixels.shape[1:]) > short_side:
        pixels = resized_to_short_side(pixels, short_side)
    if encoding == "raw":
        return raw_file(pixels), RAW_EXTENSIONS[len(pixels)]
    return _file(pixels, "JPEG", quality=JPEG_QUALITY), ".jpg"


def _pixels(source: Source, id: int) -> Tensor:
    """uint8 [C, H, W] of 1 or 3 channels. Raises UserError for others, which image files would change or not have."""
    pixels = source.fetch([id])[0]
    if pixels.is_floating_point() or len(pixels) not in (1, 3):
        kind = f"{str(pixels.dtype).removeprefix('torch.')} {list(pixels.shape)}"
        raise UserError(f"{source.name(id)} is {kind}: only images of 8 bits with 1 or 3 channels can be written.")
    return pixels


def _file(pixels: Tensor, format: str, **options: int) -> bytes:
    file = io.BytesIO()
    to_image(pixels).save(file, format, **options)
    return file.getvalue()
