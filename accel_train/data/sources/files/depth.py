"""Images of more than 8 bits a channel: which of their values are black and white, and their pixels in 8 bits.

16 bits have a range of their own, 0 to 65535. Floating-point numbers and integers of 32 bits have none: without
--data.range they are refused, because any guess makes the images of some data sets black. Signed integers and colours
of 16 bits, of which Pillow does not have the stored values, are always refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from accel_train.untrusted import is_number

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


def check_values(image: Image.Image, value_range: ValueRange | None) -> None:
    """Raise ImageError if it is not known which values of an opened image are black and white. Reads its header alone.

    Of a PNG that is loaded already, Pillow does not say any more that its colours had 16 bits.
    """
    if _is_signed(image):
        raise ImageError(
            "its pixels are signed integers: save it with floating-point numbers (NumPy's float32), and train with "
            "--data.range LOW HIGH"
        )
    if _has_deep_colours(image):
        raise ImageError(
            "it has 16 bits in each of several channels: save it with 8 bits a channel, for example with ImageMagick's "
            "mogrify -depth 8"
        )
    if value_range is None and (kind := _without_range(image)):
        raise ImageError(
            f"its pixels are {kind}, and nothing says which value is black and which is white: save it as uint8 or "
            "uint16, or train with --data.range LOW HIGH, such as 0 1 or 0 4095"
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


def in_8_bits(image: Image.Image, value_range: ValueRange | None) -> Image.Image:
    """An opened image with 8 bits a channel. One of 16 bits without a range keeps its upper 8.

    Raises ImageError, also for values outside the range.
    """
    from PIL import Image

    check_values(image, value_range)
    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    if value_range is not None and not _is_scaled_by_file(image):
        return Image.fromarray(_scaled(np.asarray(image), value_range))
    return Image.fromarray((np.clip(np.asarray(image), 0, FULL) >> 8).astype(np.uint8))  # PIL would clip them at 255


def is_deep(image: Image.Image) -> bool:
    """Whether an opened image has more than 8 bits a channel, and its file does not say which value is white."""
    return (image.mode == "F" or image.mode.startswith("I")) and not _is_scaled_by_file(image)


def largest_of_16_bits(image: Image.Image) -> int | None:
    """The largest value of an opened image of 16 bits whose file does not say which is white; else None."""
    has_16_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")
    return int(np.asarray(image).max()) if has_16_bits else None


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


def _is_scaled_by_file(image: Image.Image) -> bool:
    return image.format in SCALED_FORMATS and image.mode != "F"


def _without_range(image: Image.Image) -> str:
    """What the pixels are, in words, if no range of values follows from that; else ""."""
    if image.mode == "F":
        return "floating-point numbers"
    return "integers of 32 bits" if image.mode == "I" and image.format not in ("PNG", "PPM") else ""


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


def _has_deep_colours(image: Image.Image) -> bool:
    """Whether it has 16 bits in each of several channels, of which Pillow keeps the upper 8."""
    if image.mode.startswith("I") or image.format not in ("PNG", "TIFF"):
        return False
    stored = [str(part[3]) for part in getattr(image, "tile", ())]  # of a PNG such as RGB;16B, until it is loaded
    return _tag(image, BITS_PER_SAMPLE) == 16 or any("16" in mode for mode in stored if image.format == "PNG")


def _is_signed(image: Image.Image) -> bool:
    """Whether it is a TIFF of signed integers of 8 bits, which Pillow opens as unsigned, or of 16."""
    signed = image.format == "TIFF" and image.mode in ("L", "I") and _tag(image, SAMPLE_FORMAT) == SIGNED
    return signed and _tag(image, BITS_PER_SAMPLE) in (8, 16)


def _tag(image: Image.Image, number: int) -> int:
    """A tag of the TIFF's current page, of its first channel; 0 if there is none."""
    value = getattr(image, "tag_v2", {}).get(number, 0)
    return int(value[0] if isinstance(value, tuple) else value)
