"""JPEG files without Pillow: the size of a plain one from its first markers, and pixels by simplejpeg (libjpeg-turbo).

The pixels are Pillow's, and at a smaller scale those of its `draft`, in a fraction of the time for small images. Where
simplejpeg is not installed, or refuses a file, Pillow decodes it.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

try:
    import simplejpeg
except ImportError:  # there are no wheels for some platforms
    simplejpeg = None

START = b"\xff\xd8"
FRAMES = (0xFFC0, 0xFFC1, 0xFFC2)
"""Of a baseline, an extended and a progressive JPEG. Others (lossless, arithmetic coding) are Pillow's to decide."""
SCAN = 0xFFDA
IGNORED = {0xFFC4, 0xFFDB, 0xFFDD, 0xFFE0, *range(0xFFE2, 0xFFF0), 0xFFFE}
"""Tables, comments, profiles. Not 0xFFE1, which has the EXIF orientation."""
PROFILE = 0xFFE2
FURTHER_PICTURES = b"MPF\0"
"""How a profile begins that lists further pictures in the file."""
SEGMENT, FRAME = struct.Struct(">HH"), struct.Struct(">BHHB")
LEAST_REDUCED = 8
"""Below this size, several scales give the same number of pixels, and simplejpeg does not say which one it takes."""


def plain_jpeg(data: bytes) -> tuple[int, int, int] | None:
    """Height, width and number of channels of a JPEG of 1 or 3 channels of 8 bits that has no orientation and no
    further pictures. None: it is none, or something about its beginning is unusual."""
    if not data.startswith(START):
        return None
    size: tuple[int, int, int] | None = None
    position = len(START)
    try:
        while True:
            marker, length = SEGMENT.unpack_from(data, position)
            if marker == SCAN:
                return size
            if marker in FRAMES:
                bits, height, width, channels = FRAME.unpack_from(data, position + SEGMENT.size)
                if size is not None or bits != 8 or channels not in (1, 3) or not height * width:
                    return None
                size = height, width, channels
            elif marker not in IGNORED or (
                marker == PROFILE and data.startswith(FURTHER_PICTURES, position + SEGMENT.size)
            ):
                return None
            position += 2 + length  # the two bytes of the length count
    except struct.error:  # the data end before the scan
        return None


def decode_jpeg(
    data: bytes, height: int, width: int, channels: int, reduction: int = 1
) -> npt.NDArray[np.uint8] | None:
    """The pixels, uint8 [H, W, channels], as stored: of a grey image, or the luminance, if `channels` is 1.

    `height`, `width`: those of the whole image; with a `reduction` of 2, 4 or 8 the result is as many times smaller,
    rounded up. None if simplejpeg is not installed, or refuses the data.
    """
    if simplejpeg is None or (reduction > 1 and max(height, width) < LEAST_REDUCED):
        return None
    height, width = -(-height // reduction), -(-width // reduction)
    try:
        # With `strict`, its default, what libjpeg warns of is an error, such as data that end too early.
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(
            data, "RGB" if channels == 3 else "GRAY", min_height=height, min_width=width
        )
    except ValueError:
        return None
    return pixels if pixels.shape == (height, width, channels) else None
