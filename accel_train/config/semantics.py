"""The semantics number: it rises when the same configuration and the same data would lead to another trained model.

1   The first version; checkpoints, caches and model.json without a number have this one.
2   Images are rotated as their EXIF orientation says. The box of crop=resized is cut exactly from a JPEG decoded at a
    reduced size; before, it was rounded to that size's pixels. Data is divided into splits before
    --data.skip-unreadable leaves images out, and the training images keep their indices; before, the following images
    moved up, some of them into other splits.
3   BatchNorm normalises virtual batches, not the micro-batch of a process, and its running statistics are updated once
    an update, not once a micro-batch. Masks of dropout and drop path are functions of (seed, update, sample, layer).
4   Each call of a BatchNorm that a forward pass calls several times counts in its running statistics; before, only the
    last one did. An update without a call leaves them as they are; before, it moved them to 0. Values that are not as
    many for each sample, such as learned prototypes, count once an update; before, once a forward pass of a process.
5   Folders and tar files have more kinds of images: .jfif, .gif, .avif, .jp2 and others were left out before.

A run continues only with the semantics that it began with: an older run that a change affects is refused. No change has
affected the pixels of datasets in memory (digits, MNIST, …).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_train.errors import UserError

SEMANTICS = 5
# The latest numbers that changed these datasets: see Splits.semantics.
IN_MEMORY, IMAGE_FILES, IMAGE_NAMES = 1, 2, 5  # the last one: image files that older versions left out


def check_same_pixels(what: str, before: int, now: int) -> None:
    """Raise UserError if the images of the checkpoint `what`, with the number `before`, have other pixels now."""
    before, now = min(before, IMAGE_FILES), min(now, IMAGE_FILES)
    if before < now:
        raise UserError(
            f"{what} is from an older accel-train, which ignored the EXIF orientation of image files and cropped them "
            "differently. Finish the run with the version in state.json, or start a new run with another --output-dir."
        )
    if before > now:
        raise UserError(
            f"{what} is from a run whose images were rotated as EXIF says, but the cache was written by an older "
            "accel-train, which ignored EXIF. Write the cache again with `accel-train cache-data`."
        )


def check_same_images(what: str, before: int, images: int) -> None:
    """Raise UserError if `what`, of a run with the number `before`, left out some of these `images` by their names.

    `images`: `Splits.semantics`.
    """
    if before < IMAGE_NAMES <= images:
        raise UserError(
            f"{what} is from an older accel-train, which left out images with such names as .jfif, .gif or .avif, and "
            "the data has some. Move them out of the data's folder, or start a new run with another --output-dir."
        )


def with_older_batchnorm(saved: dict[str, Any], before: int) -> dict[str, Any]:
    """Return `saved`, the settings of a run with the number `before` whose model has BatchNorm.

    For an older run the virtual batch size becomes "each process's micro-batch", as it was then. So resuming the run,
    which changes its BatchNorm statistics, requires --allow-change virtual-batch-size.
    """
    return {**saved, "virtual_batch_size": "each process's micro-batch"} if before < 3 else saved


def check_same_calls(what: str, before: int, *, regular: bool) -> None:
    """Raise UserError if `what`, of a run with the number `before`, counted other calls of a BatchNorm.

    `regular`: each forward pass calls each BatchNorm of the model exactly once. An older run than 3 has already been
    asked for its permission (`with_older_batchnorm`).
    """
    if before == 3 and not regular:
        raise UserError(
            f"{what} is from an older accel-train. A forward pass of this model does not call each BatchNorm exactly "
            "once, and the older version counted only the last call in its running statistics. Finish the run with the "
            "version in state.json, or start a new run with another --output-dir."
        )


def check_same_splits(what: str, before: int, data: Mapping[str, Any]) -> None:
    """Raise UserError if `what`, of a run with the number `before` and the settings `data`, had other splits."""
    if before > SEMANTICS:
        raise UserError(
            f"{what} is from a newer accel-train, where the same configuration has another meaning. Use that version."
        )
    if before < 2 and data.get("skip_unreadable") is not None:
        raise UserError(
            f"{what} is from an older accel-train, which left out the images of --data.skip-unreadable before it "
            "divided the data, so its splits were different. Use that version for this run, or start a new run with "
            "another --output-dir."
        )
