"""Some images of a dataset, preprocessed for the cache: resized, encoded, with checksums."""

from __future__ import annotations

import io
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from accel_train.data.sources.files.encoded import EncodedImages
from accel_train.data.sources.files.images import to_image
from accel_train.data.sources.splits import Source
from accel_train.data.transforms.resizing import resized_to_short_side
from accel_train.errors import UserError

JPEG_QUALITY = 90

Unreadable = tuple[str, str]
"""Name of the image, and why it cannot be read."""


@dataclass
class Chunk:
    """Several images: `data` holds their bytes one after the other, and each list has one entry per image."""

    data: bytes
    sizes: list[int]
    """Bytes of each image; 0 if it cannot be read."""
    heights: list[int]
    widths: list[int]
    checksums: list[int]
    unreadable: list[Unreadable]


def encode(source: Source, first: int, last: int, short_side: int, encoding: str) -> Chunk:
    """Preprocess images first..last-1; `encoding` is "raw" or "jpeg". No image is enlarged. An image that cannot be
    read takes no bytes."""
    assert isinstance(source, EncodedImages)
    encoded, chunk = [], Chunk(b"", [], [], [], [], [])
    for id in range(first, last):
        try:
            image = source.open(id).pixels()
            if min(image.shape[1:]) > short_side:
                image = resized_to_short_side(image, short_side)
        except UserError as error:
            chunk.unreadable.append((source.name(id), str(error.__cause__ or error)))
            image = torch.empty(0, 0, 0)
        encoded.append(b"" if not image.numel() else _bytes(image, encoding))
        chunk.sizes.append(len(encoded[-1]))
        chunk.heights.append(image.shape[1])
        chunk.widths.append(image.shape[2])
        chunk.checksums.append(zlib.crc32(encoded[-1]))
    chunk.data = b"".join(encoded)
    return chunk


def _bytes(image: Tensor, encoding: str) -> bytes:
    if encoding == "raw":
        return image.permute(1, 2, 0).contiguous().numpy().tobytes()
    file = io.BytesIO()
    to_image(image).save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()
