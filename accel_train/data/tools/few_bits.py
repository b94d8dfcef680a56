"""Do a data set's images of 16 bits use only a small part of their range? Cameras store 10, 12 or 14 bits in 16."""

from __future__ import annotations

from accel_train.data.sources.files.depth import few_bits_notes, range_text
from accel_train.data.sources.files.encoded import EncodedImages
from accel_train.data.sources.files.images import ImageError
from accel_train.data.sources.splits import Source, unwrap_subset
from accel_train.errors import UserError

LOOKED_AT = 4  # images: those of a camera can have 20 million pixels each


def depth_notes(source: Source) -> list[str]:
    """A warning if a few images of `source`, spread over it, would be all too dark, or if --data.range has no effect on
    them. An image that cannot be read is left out."""
    held, ids = unwrap_subset(source)
    if not isinstance(held, EncodedImages):
        return []
    count = min(len(source), LOOKED_AT)
    largest: list[int] = []
    deep = looked_at = 0
    for number in range(count):
        position = number * (len(source) - 1) // max(1, count - 1)
        try:
            image = held.open(position if ids is None else int(ids[position]))
            deep += image.is_deep
            looked_at += 1
            if held.value_range is None and (value := image.largest_of_16_bits()) is not None:
                largest.append(value)
        except (UserError, ImageError):
            continue
    if held.value_range is not None:
        if deep or not looked_at:
            return []
        return [
            f"--data.range {range_text(held.value_range)} changes only images of more than 8 bits, and none of the "
            f"{looked_at} that were looked at is one"
        ]
    return few_bits_notes(largest)
