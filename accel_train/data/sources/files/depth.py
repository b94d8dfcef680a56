"""Images of more than 8 bits a channel: which of their values are black and white, and their pixels in 8 bits.

16 bits have a range of their own, 0 to 65535. Floating-point numbers and integers of 32 bits have none: without
--data.range they are refused, because any guess makes the images of some data sets black.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from accel_train.untrusted import LARGEST, is_number, read_regular_file

if TYPE_CHECKING:
    from PIL import Image

ValueRange = tuple[float, float]
"""The values of black and of white."""
Values = npt.NDArray[Any]
"""[H, W], or [H, W, C]."""

MOST = 1e38  # of float32
FULL = 65535  # of 16 bits
USUAL_BITS = (8, 10, 12, 14)  # that cameras and microscopes store in 16
BITS_PER_SAMPLE, SUBFILE_TYPE, SAMPLE_FORMAT = 258, 254, 339  # tags of TIFF
SIGNED = 2  # SAMPLE_FORMAT of integers
PART_OF_FIRST = 0b101  # SUBFILE_TYPE of a page that is a reduced copy of another one, or its mask
ANIMATED = ("GIF", "WEBP", "PNG", "AVIF")
SCALED_FORMATS = ("PPM", "JPEG2000")  # such a file says which value is white; Pillow scales the values to 16 bits


class ImageError(ValueError):
    """An image cannot be decoded; the text says why."""


def is_value_range(value: Any) -> bool:
    """Whether a value that was read from a file is a range, or None."""
    is_pair = isinstance(value, tuple) and len(value) == 2 and all(is_number(end, -MOST, MOST) for end in value)
    return value is None or (is_pair and value[0] < value[1])


def range_text(value_range: ValueRange) -> str:
    """The range as it is written on a command line: "0 4095"."""
    return " ".join(f"{value:.12g}" for value in value_range)


def check_values(image: Image.Image, data: bytes, value_range: ValueRange | None) -> None:
    """Raise ImageError if it is not known which values of an opened image are black and white. Reads its header alone.

    `data`: the encoded image; b"" if it is not known.
    """
    if value_range is None and (kind := _without_range(image)):
        raise ImageError(
            f"its pixels are {kind}, and nothing says which value is black and which is white: save it as uint8 or "
            "uint16, or train with --data.range LOW HIGH, such as 0 1 or 0 4095"
        )
    if value_range is not None and _bits(image, data) == 16 and image.format != "PNG" and _has_colours(image):
        raise ImageError(
            "it has 16 bits in each of several colours, of which only those of a PNG can be scaled by --data.range: "
            "save it as PNG, or with 8 bits"
        )


def check_pages(image: Image.Image) -> None:
    """Raise ImageError if an opened TIFF has several pages, or if it is an animation: which picture is the sample?

    Reduced copies and masks of a TIFF's first page do not count. Nor do the further pictures in a camera's JPEG (MPO).
    """
    if image.format in ANIMATED and getattr(image, "is_animated", False):
        raise ImageError(
            f"it is an animation of {getattr(image, 'n_frames', 2)} pictures, but a sample is one image: save the "
            "picture that you mean as a file of its own"
        )
    pages = getattr(image, "n_frames", 1) if image.format == "TIFF" else 1
    for page in range(1, pages):
        image.seek(page)
        if not _tag(image, SUBFILE_TYPE) & PART_OF_FIRST:
            raise ImageError(
                f"it is a TIFF of {pages} pages, but a sample is one image: save each page as a file of its own, or "
                "the first one alone"
            )
    if pages > 1:
        image.seek(0)


def in_8_bits(image: Image.Image, data: bytes, value_range: ValueRange | None) -> Image.Image:
    """An opened image with 8 bits a channel. One of 16 bits without a range keeps its upper 8.

    `data`: as `check_values` has it; of a PNG it is read again if it is not known and needed. Raises ImageError, also
    for values outside the range.
    """
    from PIL import Image

    if value_range is not None and image.format == "PNG" and not data:
        data = _file_of(image)
    check_values(image, data, value_range)
    if value_range is not None and not _is_scaled_by_file(image):
        values = _values(image, data)
        return image if values is None else Image.fromarray(_scaled(values, value_range))
    if image.mode.startswith("I"):  # 16 bits; PIL's conversion would clip them at 255
        return Image.fromarray((np.clip(np.asarray(image), 0, FULL) >> 8).astype(np.uint8))
    return image


def is_deep(image: Image.Image, data: bytes) -> bool:
    """Whether an opened image has more than 8 bits a channel, and its file does not say which value is white."""
    return not _is_scaled_by_file(image) and (_bits(image, data) > 8 or _is_signed(image))


def largest_of_16_bits(image: Image.Image, data: bytes) -> int | None:
    """The largest value of an opened image of 16 bits a channel whose file does not say which is white; else None.

    Of colours in other files than PNG only the upper 8 bits are known, and the largest value with these is returned.
    """
    if _bits(image, data) != 16 or _is_scaled_by_file(image):
        return None
    if _has_colours(image) and image.format != "PNG":
        return int(np.asarray(image.convert("RGB")).max()) << 8 | 0xFF
    values = _values(image, data)
    return None if values is None else int(values.max())


def few_bits_notes(largest: Sequence[int]) -> list[str]:
    """A warning if all images of 16 bits that were looked at, with these largest values, may have fewer bits."""
    value = max(largest, default=0)
    bits = next((bits for bits in USUAL_BITS if value < 2**bits), None)
    if bits is None or not value:
        return []
    return [
        f"the images of 16 bits are dark: of {len(largest)} that were looked at, the largest value is {value:,}, not "
        f"{FULL:,}. If {2**bits - 1:,} is white ({bits} bits), give --data.range 0 {2**bits - 1}"
    ]


def _file_of(image: Image.Image) -> bytes:
    """The bytes from which Pillow has opened an image, because of 16-bit colours it has the upper 8 bits alone.

    b"" if they are gone.
    """
    stream, name = getattr(image, "fp", None), getattr(image, "filename", "")
    if stream is not None:
        position = stream.tell()
        stream.seek(0)
        content: bytes = stream.read()
        stream.seek(position)
        return content
    return read_regular_file(Path(name), LARGEST, follow=True) if name and Path(name).is_file() else b""


def _is_scaled_by_file(image: Image.Image) -> bool:
    return image.format in SCALED_FORMATS and image.mode != "F"


def _without_range(image: Image.Image) -> str:
    """What the pixels are, in words, if no range of values follows from that; else ""."""
    if image.mode == "F":
        return "floating-point numbers"
    if _is_signed(image):
        return "signed integers"
    return "integers of 32 bits" if image.mode == "I" and image.format not in ("PNG", "PPM") else ""


def _values(image: Image.Image, data: bytes) -> Values | None:
    """The values of the pixels; None if they have 8 bits."""
    if image.mode == "F" or image.mode.startswith("I"):
        return np.asarray(image)
    if _is_signed(image):
        return np.asarray(image).view(np.int8)  # Pillow opens them as unsigned
    return _of_png(data) if _bits(image, data) == 16 and image.format == "PNG" else None


def _of_png(data: bytes) -> Values:
    """The values of a PNG of 16 bits without transparency, [H, W, 3] or [H, W]. Pillow has only their upper 8 bits."""
    import torch
    from torchvision.io import ImageReadMode, decode_image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision warns of changes to its decoders
        file = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        pixels: torch.Tensor = decode_image(file, mode=ImageReadMode.UNCHANGED)
    values: Values = pixels.numpy()  # [C, H, W]
    colours: Values = values[:3].transpose(1, 2, 0)
    return colours if len(values) >= 3 else colours[..., 0]


def _scaled(values: Values, value_range: ValueRange) -> npt.NDArray[np.uint8]:
    """The values as uint8: the range's first one becomes 0, its last one 255. Raises ImageError if one is outside."""
    # A float32 of 0.7 is not the float64 of 0.7 that the range has.
    low, high = (values.dtype.type(end) if values.dtype.kind == "f" else end for end in value_range)
    least, largest = values.min(), values.max()
    if not (low <= least and largest <= high):  # also if there is a NaN
        outside = largest if low <= least else least
        raise ImageError(f"it has the value {outside:.12g}, outside --data.range {range_text(value_range)}")
    levels = (values.astype(np.float64) - float(low)) * (255 / (float(high) - float(low)))
    return np.rint(levels).clip(0, 255).astype(np.uint8)


def _bits(image: Image.Image, data: bytes) -> int:
    """The bits of a channel: 16 also of an image in colours, which Pillow opens with 8."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return 16
    if image.mode in ("F", "I"):
        return 32
    if image.format == "PNG" and len(data) > 24:
        return data[24]
    return 16 if _tag(image, BITS_PER_SAMPLE) == 16 else 8


def _has_colours(image: Image.Image) -> bool:
    return image.mode not in ("F", "L", "LA") and not image.mode.startswith("I")


def _is_signed(image: Image.Image) -> bool:
    """Whether it is a TIFF of signed integers."""
    return image.format == "TIFF" and image.mode in ("L", "I") and _tag(image, SAMPLE_FORMAT) == SIGNED


def _tag(image: Image.Image, number: int) -> int:
    """A tag of the TIFF's current page, of its first channel; 0 if there is none."""
    value = getattr(image, "tag_v2", {}).get(number, 0)
    return int(value[0] if isinstance(value, tuple) else value)
