"""Some samples of a dataset as they are in a WebDataset shard: KEY.jpg and KEY.cls, two files of a tar file each."""

from __future__ import annotations

import io
import posixpath
from collections.abc import Sequence

from torch import Tensor

from accel_train.data.sources.files.encoded import EncodedImages
from accel_train.data.sources.files.images import ImageError, to_image
from accel_train.data.sources.files.tars import RAW_EXTENSIONS, packed, raw_file
from accel_train.data.sources.files.webdataset import SEPARATOR
from accel_train.data.sources.splits import Source, label_numbers, unwrap_subset
from accel_train.data.transforms.image import resized_to_short_side
from accel_train.errors import UserError

FORMATS = {b"\xff\xd8\xff": ".jpg", b"\x89PNG\r\n\x1a\n": ".png", b"GIF8": ".gif", b"BM": ".bmp", b"II*\0": ".tif"}
"""First bytes of a file -> its extension. A dataset of a hub may have no names; and WebDataset's readers, which know
images by their extension, mostly know .jpg but not .JPEG."""


JPEG_QUALITY = 90


def pack(source: Source, first: int, last: int, encoding: str, short_side: int, keys: Sequence[str]) -> list[bytes]:
    """Samples first..last-1 as parts of a tar file, with these keys. Raises UserError if one cannot be read.

    `encoding`: "copy" writes the images' own files, "jpeg" and "raw" their pixels, with at most this `short_side`.

    The headers have no owner and no time, so that the same samples are the same bytes.
    """
    held, ids = unwrap_subset(source)
    samples = []
    for key, id in zip(keys, range(first, last), strict=True):
        number = id if ids is None else int(ids[id])
        content, extension = _copy(held, number) if encoding == "copy" else _encoded(held, number, encoding, short_side)
        own = source.labels[id]
        text = str(int(own)) if own.ndim == 0 else f"{SEPARATOR.join(map(str, label_numbers(own)))}{SEPARATOR}"
        samples.append(b"".join([*packed(f"{key}{extension}", content), *packed(f"{key}.cls", text.encode())]))
    return samples


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
