"""Images that are stored as pixels, in the tar files that `accel-train shards --encoding raw` writes.

Each is a PPM file (of a grey image: PGM), which other programs read, too. A comment in its header has the number of
this format and the CRC-32 of the pixels.
"""

from __future__ import annotations

import re
import zlib

import torch

from accel_train.data.sources.files.images import LazyImage

RAW_FORMAT = 1
"""Another number in a file: its pixels are stored in another way."""
HEADER = re.compile(rb"P([56])\n# accel_train raw (\d{1,9}) ([0-9a-f]{8})\n([1-9]\d{0,8}) ([1-9]\d{0,8})\n255\n")
LONGEST_HEADER = 96
EXTENSIONS = {1: ".pgm", 3: ".ppm"}
"""By the number of channels."""


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

    def largest_of_16_bits(self) -> None:
        return None

    def looks_truncated(self) -> bool:
        return False

    def pixels(self) -> torch.Tensor:
        values = torch.frombuffer(self.bytes, dtype=torch.uint8)  # no copy: pixels outside the crop are not read
        return values.view(self.height, self.width, -1).permute(2, 0, 1)
