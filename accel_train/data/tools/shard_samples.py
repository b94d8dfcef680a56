"""Some samples of a dataset as they are in a WebDataset shard: KEY.jpg and KEY.cls, two files of a tar file each."""

from __future__ import annotations

import io
import posixpath
from collections.abc import Sequence

from torch import Tensor

from accel_train.data.sources.cache import CachedImages
from accel_train.data.sources.files.encoded import EncodedImages
from accel_train.data.sources.files.images import ImageError, to_image
from accel_train.data.sources.files.tars import packed
from accel_train.data.sources.splits import Source, unwrap_subset
from accel_train.errors import UserError

FORMATS = {b"\xff\xd8\xff": ".jpg", b"\x89PNG\r\n\x1a\n": ".png", b"GIF8": ".gif", b"BM": ".bmp", b"II*\0": ".tif"}
"""First bytes of a file -> its extension. A dataset of a hub may have no names; and WebDataset's readers, which know
images by their extension, mostly know .jpg but not .JPEG."""


def pack(source: Source, first: int, last: int, keys: Sequence[str]) -> list[bytes]:
    """Samples first..last-1 as parts of a tar file, with these keys. Raises UserError if one cannot be read.

    The headers have no owner and no time, so that the same samples are the same bytes.
    """
    held, ids = unwrap_subset(source)
    samples = []
    for key, id in zip(keys, range(first, last), strict=True):
        content, extension = _image(held, id if ids is None else int(ids[id]))
        label = str(int(source.labels[id])).encode()
        samples.append(b"".join([*packed(f"{key}{extension}", content), *packed(f"{key}.cls", label)]))
    return samples


def _image(source: Source, id: int) -> tuple[bytes, str]:
    """The file of an image, and its extension: the encoded image as it is, or else its pixels as PNG."""
    if not isinstance(source, EncodedImages) or isinstance(source, CachedImages):
        return _png(source.fetch([id])[0], source.name(id)), ".png"
    try:
        content = source.read(id)
    except (OSError, ImageError) as error:
        raise source.unreadable(id, error) from error
    usual = (extension for start, extension in FORMATS.items() if content.startswith(start))
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return content, ".webp"
    return content, next(usual, posixpath.splitext(source.name(id))[1].lower())


def _png(pixels: Tensor, name: str) -> bytes:
    """`pixels`: uint8 [C, H, W]. Raises UserError for others, which PNG would change or does not know."""
    if pixels.is_floating_point() or len(pixels) not in (1, 3):
        kind = f"{str(pixels.dtype).removeprefix('torch.')} {list(pixels.shape)}"
        raise UserError(f"{name} is {kind}: only images of 8 bits with 1 or 3 channels can be written as PNG.")
    file = io.BytesIO()
    to_image(pixels).save(file, "PNG")
    return file.getvalue()
