"""What the same configuration and the same data mean: a number that rises when what is learned from them changes.

1   The beginning; checkpoints, caches and model.json without a number have this one.
2   Images are turned as their EXIF orientation says. The box of crop=resized is cut exactly from a JPEG that is decoded
    smaller; before, it was rounded to the smaller one's pixels. Splits are divided before --data.skip-unreadable leaves
    images out, and the training images keep their numbers; before, the others moved up, and into other splits.

A run goes on only under the meaning that it began with: an older one that a change concerns is refused. Sets in memory
(digits, MNIST, …) mean what they always did.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_train.errors import UserError

SEMANTICS = 2
IN_MEMORY, IMAGE_FILES = 1, 2  # the newest numbers that changed their pixels: see Splits.semantics


def check_same_pixels(what: str, before: int, now: int) -> None:
    """Raise UserError unless `what`, a checkpoint whose images were made by the number `before`, gets the same now."""
    if before < now:
        raise UserError(
            f"{what} is of an older accel-train, which ignored the EXIF orientation of image files and cropped them "
            "otherwise: finish the run with the version that state.json names, or begin anew in another --output-dir."
        )
    if before > now:
        raise UserError(
            f"{what} is of a run whose images were turned as EXIF says, but the cache was written by an older "
            "accel-train, which ignored that: write it again with `accel-train cache-data`."
        )


def check_same_division(what: str, before: int, data: Mapping[str, Any]) -> None:
    """Raise UserError unless `what`, of a run of the number `before` with the settings `data`, had today's splits."""
    if before > SEMANTICS:
        raise UserError(f"{what} is of a newer accel-train, which means something else by the same configuration.")
    if before < 2 and data.get("skip_unreadable") is not None:
        raise UserError(
            f"{what} is of an older accel-train, which left out what --data.skip-unreadable lists before it divided "
            "the data: today's splits are others. Use that version for this run, or begin anew in another --output-dir."
        )
