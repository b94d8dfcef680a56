"""Images in tar files, which are WebDataset's shards.

The tar files are read once to find the position of each image, which the index keeps. Then loading an image is one read
at its position: the samples can have any order, as with files, and need not fit into memory.
"""

from __future__ import annotations

import mmap
import os
import posixpath
import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from accel_train.config.schema import Data
from accel_train.data.sources.folder import is_image
from accel_train.data.sources.images import ChangedError, EncodedImages, LazyImage
from accel_train.data.sources.index import SplitFiles
from accel_train.errors import UserError
from accel_train.files import open_to_read

END = bytes(2 * tarfile.BLOCKSIZE)
"""Of a tar file."""
MOST_MAPPED = 256
"""Tar files that a process maps at a time: Python keeps each one open, and a process may open some 1,000 files."""
RAW_EXTENSIONS = {1: ".pgm", 3: ".ppm"}
"""Of images that are stored as pixels, by the number of channels."""


@dataclass(frozen=True)
class Member:
    """A file inside a tar file."""

    name: str
    """Path inside `tar`."""
    tar: str
    """The tar file, relative to the data's root."""
    offset: int
    """In bytes, from the tar file's start."""
    size: int
    """In bytes."""


class TarImages(EncodedImages):
    """Images inside tar files, read at their positions without unpacking."""

    def __init__(
        self, root: Path, tars: tuple[str, ...], files: SplitFiles, data: Data, folder: Path | None = None
    ) -> None:
        """`tars`: relative to `root`, by their numbers in `files.positions`. `folder`: where they are read, if not in
        `root`, which names the images: this node has a copy of it."""
        super().__init__(files.labels, data)
        self.root, self.tars, self.names = root, tars, files.names
        self.folder = root if folder is None else folder
        assert files.positions is not None
        self.positions = files.positions
        self._maps: dict[int, mmap.mmap] = {}
        self._verified = np.empty(0, dtype=np.bool_)  # of each image, whether this process has compared its checksum

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}, "_verified": np.empty(0, dtype=np.bool_)}

    @property
    def shard_numbers(self) -> torch.Tensor:
        """int64 [n], the tar file of each image; the images of one follow each other."""
        return self.positions[:, 0]

    def read(self, id: int) -> bytes:
        tar, offset, size = self.positions.numpy()[id].tolist()
        with open_to_read(self.folder / self.tars[tar], buffering=0) as file:
            file.seek(offset - tarfile.BLOCKSIZE)
            content = file.read(tarfile.BLOCKSIZE + size)
        _check_member(content[: tarfile.BLOCKSIZE], size, len(content) - tarfile.BLOCKSIZE)
        return content[tarfile.BLOCKSIZE :]

    def open(self, id: int) -> LazyImage:
        if not len(self._verified):
            self._verified = np.zeros(len(self), dtype=np.bool_)
        if self._verified[id] or self.names[id].endswith(tuple(RAW_EXTENSIONS.values())):
            try:
                image = self._raw(id)
            except (OSError, ValueError) as error:
                raise self.unreadable(id, error) from error
            if image is not None and image.channels == self.channels:
                return image
        return super().open(id)

    def _raw(self, id: int) -> RawImage | None:
        """The image in the mapped memory of its tar file; None if it is not one of `accel-train shards --encoding raw`.

        When it is read first, its place and its checksum are verified. Raises OSError, and ValueError for an empty tar
        file.
        """
        tar, offset, size = self.positions.numpy()[id].tolist()
        if tar not in self._maps:
            if len(self._maps) == MOST_MAPPED:
                del self._maps[next(iter(self._maps))]  # images in it keep it
            with open_to_read(self.folder / self.tars[tar], buffering=0) as file:
                # torch wants writable memory; the file itself is never changed.
                self._maps[tar] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        whole = memoryview(self._maps[tar])
        stored = whole[offset : offset + size]
        if not self._verified[id]:
            _check_member(bytes(whole[offset - tarfile.BLOCKSIZE : offset]), size, len(stored))
        header = HEADER.match(stored[:LONGEST_HEADER])
        if header is None:
            return None
        image = RawImage(stored, header)
        if not self._verified[id]:
            image.check()
            self._verified[id] = True
        return image

    def name(self, id: int) -> str:
        tar = self.tars[int(self.positions[id, 0])]
        return "/".join(part for part in (str(self.root), tar, self.names[id]) if part)


def _check_member(header: bytes, size: int, there: int) -> None:
    """Raise OSError unless a block of a tar file is the `header` of a file of `size` bytes, of which so many are
    `there`."""
    if len(header) < tarfile.BLOCKSIZE or there < size:
        raise OSError("the tar file ends before this image")
    try:
        is_same = tarfile.nti(header[124:136]) == size  # type: ignore[attr-defined]  # its place in all formats
    except tarfile.HeaderError:
        is_same = False
    if not is_same:
        raise ChangedError("the tar file has changed since its headers were read, without a new size or time")


def members_of(root: Path, tar: str) -> Iterator[tuple[Member, IO[bytes]]]:
    """Yields each file in the tar file `root / tar`, with its content.

    It clears `TarFile.members` and reads `TarFile.offset` (checked with Python 3.11). Raises UserError.
    """
    path = root / tar
    try:
        with open_to_read(path) as opened, tarfile.open(fileobj=opened, mode="r:") as archive:
            size = os.fstat(opened.fileno()).st_size
            for info in archive:
                if info.size < 0 or info.issparse():  # tarfile would read a header repeatedly, or data from elsewhere
                    raise tarfile.ReadError(f"{info.name} has no size or is sparse")
                name = posixpath.normpath(info.name)
                hidden = any(part.startswith(".") for part in name.split("/"))
                if (info.issym() or info.islnk()) and not hidden and is_image(posixpath.basename(name)):
                    raise tarfile.ReadError(
                        f"{name} is a link; pack the files with tar's options --dereference --hard-dereference"
                    )
                content = archive.extractfile(info) if info.isreg() and not hidden else None
                if content is None:
                    continue
                if info.offset_data + info.size > size:
                    raise tarfile.ReadError("unexpected end of data")
                yield Member(name, tar, info.offset_data, info.size), content
                archive.members = []  # type: ignore[attr-defined]  # free the memory of tarfile's list of members
            with open_to_read(path) as file:
                _check_end(archive, file)
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(
            f"the tar file {path} cannot be read ({error}); it must be complete and not compressed."
        ) from error


def _check_end(archive: tarfile.TarFile, file: IO[bytes]) -> None:
    """Raise ReadError unless `archive`, read to its end, ends with a block of zeros followed by nothing but zeros.

    tarfile itself accepts a truncated file as a whole archive.
    """
    file.seek(archive.offset)
    marker = file.read(tarfile.BLOCKSIZE)
    if len(marker) < tarfile.BLOCKSIZE or marker.strip(b"\0"):
        raise tarfile.ReadError("it is truncated: its end marker is missing")
    while rest := file.read(1 << 20):
        if rest.strip(b"\0"):
            raise tarfile.ReadError("data follows its end marker; pack concatenated tar files as one archive")


# Images that are stored as pixels, in the tar files that `accel-train shards --encoding raw` writes.
#
# Each is a PPM file (of a grey image: PGM), which other programs read, too. A comment in its header has the number of
# this format and the CRC-32 of the pixels.


RAW_FORMAT = 1
"""Another number in a file: its pixels are stored in another way."""
HEADER = re.compile(rb"P([56])\n# accel_train raw (\d{1,9}) ([0-9a-f]{8})\n([1-9]\d{0,8}) ([1-9]\d{0,8})\n255\n")
LONGEST_HEADER = 96


def raw_file(pixels: torch.Tensor) -> bytes:
    """The file of an image, uint8 [C, H, W] of 1 or 3 channels."""
    channels, height, width = pixels.shape
    content = pixels.permute(1, 2, 0).contiguous().numpy().tobytes()
    kind = {1: 5, 3: 6}[channels]
    header = f"P{kind}\n# accel_train raw {RAW_FORMAT} {zlib.crc32(content):08x}\n{width} {height}\n255\n"
    return header.encode() + content


class RawImage(LazyImage):
    """An image of which the pixels are in memory already, or in the mapped memory of a file."""

    def __init__(self, file: memoryview, header: re.Match[bytes]) -> None:
        """`header`: what HEADER has found in the `file`. Raises OSError if the file is not whole."""
        kind, number, checksum, width, height = header.groups()
        if int(number) != RAW_FORMAT:
            raise OSError(
                f"its raw format has the number {int(number)}, and this version of accel-train reads {RAW_FORMAT}: "
                "write it again with `accel-train shards`"
            )
        self.channels = 3 if kind == b"6" else 1
        self.width, self.height, self.checksum = int(width), int(height), int(checksum, 16)
        self.bytes = file[header.end() :]
        if len(self.bytes) != self.channels * self.width * self.height:
            raise OSError("its size is not that of its pixels")

    def check(self) -> None:
        """Raise OSError if the pixels are not those that were written."""
        if zlib.crc32(self.bytes) != self.checksum:
            raise OSError("it was changed (its checksum is wrong)")

    def pixels(self) -> torch.Tensor:
        values = torch.frombuffer(self.bytes, dtype=torch.uint8)  # no copy: pixels outside the crop are not read
        return values.view(self.height, self.width, -1).permute(2, 0, 1)
