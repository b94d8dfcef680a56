"""What the audit keeps of an image: one record of fixed size, from its decoded pixels.

Equal images are found by a hash of the pixels, not of the file: the same picture with other metadata, or as PNG and as
BMP, is equal. Images that look alike are found by a perceptual hash and a thumbnail; see duplicates.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.fft import dctn
from torch.nn.functional import interpolate

from accel_train.audit.unreadable import kind_of
from accel_train.data.sources.files.encoded import EncodedImages, file_state
from accel_train.data.sources.files.folder import FileImages
from accel_train.data.sources.splits import Source, unwrap_subset
from accel_train.errors import UserError

THUMBNAIL = 16  # pixels a side
COPY, SMALL_COPY = 64, 32  # pixels a side of what colours and looks are computed from; the latter of small images
GREY_LEVELS = 8  # of 255, by which the colours of a grey image may differ: those of a JPEG are rounded
ONE_CHANNEL, GREY, COLOUR = 1, 2, 3
VERSION = b"1"
"""To be raised when the record of the same image changes."""

RECORD = np.dtype(
    [
        ("name", "<u8"),  # a hash of the image's name in its data set
        ("state", "<u8", 2),  # a hash of its name, and of size and time of its file; 0: it must be looked at again
        ("pixels", "<u8", 2),  # a hash of the decoded pixels
        ("look", "<u8"),  # the perceptual hash
        ("height", "<i4"),
        ("width", "<i4"),
        ("low", "<f4"),  # the smallest and the largest value; NaN if a value is NaN or infinite
        ("high", "<f4"),
        ("spread", "<f4"),  # standard deviation of the thumbnail, on the scale of the values
        ("orientation", "u1"),  # of EXIF, 1 to 8
        ("colours", "u1"),  # ONE_CHANNEL, GREY or COLOUR; 0 with other numbers of channels
        ("constant", "u1"),  # whether all its pixels are the same
        ("readable", "u1"),
        ("thumbnail", "i1", THUMBNAIL * THUMBNAIL),  # of mean 0 and standard deviation 32
        ("check", "<u8"),  # see kept.py
    ]
)
Records = npt.NDArray[Any]
"""RECORD [n]."""


@dataclass(frozen=True)
class Unreadable:
    """An image that cannot be read."""

    id: int
    """Its number in its source; in an `AuditResult` that of all images."""
    kind: str
    """One of KINDS in unreadable.py."""
    why: str
    package: str = ""
    """What reads this format."""


def name_hash(name: str) -> int:
    """The `name` of a record: a hash of the image's name relative to the data's root."""
    return int.from_bytes(_hash(name.encode("utf-8", "surrogateescape"))[:8], "little")


def look(
    source: Source, first: int, last: int, options: str, names: npt.NDArray[np.uint64], kept: Records
) -> tuple[Records, list[Unreadable], int]:
    """Return the records of images first..last-1, those that cannot be read, and how many records were kept ones.

    `options`: text of what else decides the pixels; `names`: uint64 [n], the `name_hash` of each; `kept`: the records
    of earlier audits with these names, or of other ones.
    """
    held, ids = unwrap_subset(source)
    records = np.zeros(last - first, RECORD)
    records["name"], records["orientation"] = names, 1
    known = {int(record["name"]): record for record in kept}
    unreadable: list[Unreadable] = []
    if held.in_memory and isinstance(pixels := source.fetch(range(first, last)), torch.Tensor):
        measure(pixels, records)
        return records, unreadable, 0
    reused = 0
    for row, id in enumerate(range(first, last)):
        below = id if ids is None else int(ids[id])
        state = _state(held, below, options + source.name(id))
        before = known.get(int(names[row]))
        if state and before is not None and before["state"].tobytes() == state:
            records[row] = before
            reused += 1
            continue
        try:
            if isinstance(held, EncodedImages):
                image = held.open(below)
                records[row]["orientation"] = getattr(image, "orientation", 1)  # that of a cache has none
                pixels = image.pixels()
            else:
                pixels = source.fetch([id])[0]
        except UserError as error:
            data = _content(held, below)
            unreadable.append(Unreadable(id, *kind_of(error, data)))
            continue
        measure(pixels[None], records[row : row + 1])
        if state:
            records[row]["state"] = np.frombuffer(state, np.uint64)
    return records, unreadable, reused


def measure(pixels: torch.Tensor, records: Records) -> None:
    """Write into `records` [n] what follows from the pixels, uint8 or float32 [n, C, H, W]."""
    count, channels, height, width = pixels.shape
    records["readable"], records["height"], records["width"] = 1, height, width
    stored = pixels.permute(0, 2, 3, 1).contiguous().numpy()  # as a decoder has them: it copies nothing
    flat = stored.reshape(count, -1)
    low, high = flat.min(1).astype(np.float32), flat.max(1).astype(np.float32)  # NaN if a value is
    finite = np.isfinite(low) & np.isfinite(high)
    records["low"], records["high"] = np.where(finite, low, np.nan), np.where(finite, high, np.nan)
    about = f"{pixels.dtype} {height} {width} {channels}".encode()
    for number in range(count):
        records["pixels"][number] = np.frombuffer(_hash(about, stored[number].data), np.uint64)

    small = pixels if pixels.dtype == torch.uint8 else pixels.float().nan_to_num(0.0, 0.0, 0.0)
    side = SMALL_COPY if min(height, width) < COPY else COPY
    copy = interpolate(small, (side, side), mode="bilinear", antialias=True).float().numpy()
    if channels == 3:
        limit = GREY_LEVELS if pixels.dtype == torch.uint8 else GREY_LEVELS / 255
        differ = (copy.max(1) - copy.min(1)).reshape(count, -1).max(1) > limit
        records["colours"] = np.where(differ, COLOUR, GREY)
    elif channels == 1:
        records["colours"] = ONE_CHANNEL
    grey = _shrunk(copy.mean(1), SMALL_COPY)
    records["look"] = perceptual_hash(grey)
    thumbnail = _shrunk(grey, THUMBNAIL).reshape(count, -1)
    thumbnail = thumbnail - thumbnail.mean(1, keepdims=True)
    records["spread"] = spread = thumbnail.std(1)
    scaled = 32 * thumbnail / np.maximum(spread, 1e-6)[:, None]
    records["thumbnail"] = scaled.round().clip(-127, 127).astype(np.int8)
    maybe = spread < 1e-3 * np.maximum(1, np.abs(high))  # else it cannot be constant
    records["constant"] = [bool(may and (image == image[0, 0]).all()) for may, image in zip(maybe, stored, strict=True)]


def perceptual_hash(grey: npt.NDArray[np.float32]) -> npt.NDArray[np.uint64]:
    """uint64 [n] of images [n, 32, 32]: for each of the 8x8 lowest frequencies of the cosine transform, whether it is
    above their median (pHash: Zauner, "Implementation and Benchmarking of Perceptual Image Hash Functions", 2010)."""
    lowest = dctn(grey, axes=(1, 2), norm="ortho")[:, :8, :8].reshape(-1, 64)
    bits = lowest > np.median(lowest, axis=1, keepdims=True)
    return np.packbits(bits, axis=1).view(np.uint64)[:, 0]


def _shrunk(grey: npt.NDArray[np.float32], size: int) -> npt.NDArray[np.float32]:
    """Images [n, k * size, k * size] as [n, size, size]."""
    count, factor = len(grey), grey.shape[1] // size
    parts: npt.NDArray[np.float32] = grey.reshape(count, size, factor, size, factor).mean((2, 4))
    return parts


def _hash(*parts: Any) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _state(held: Source, id: int, about: str) -> bytes:
    """What an image's record depends on: of a file its size and time, else its bytes; b"" if it is not stored."""
    text = about.encode("utf-8", "surrogateescape")
    try:
        if isinstance(held, FileImages):
            return _hash(VERSION, text, file_state(held.root / held.paths[id]).encode())
        return _hash(VERSION, text, held.read(id)) if isinstance(held, EncodedImages) else b""
    except (OSError, UserError, ValueError):
        return b""


def _content(held: Source, id: int) -> bytes | None:
    """The bytes of an image that cannot be decoded; None if they cannot be read either."""
    try:
        return held.read(id) if isinstance(held, EncodedImages) else None
    except (OSError, UserError, ValueError):
        return None
