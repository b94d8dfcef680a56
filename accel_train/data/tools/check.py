"""The work of `accel-train check-data`: decode every image of a dataset and list the unreadable ones."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from accel_train.config.schema import Data
from accel_train.data.sources.divide import divide
from accel_train.data.sources.files.encoded import EncodedImages
from accel_train.data.sources.load import Source, read_splits
from accel_train.data.sources.unreadable_list import check_own_list, default_list, write_list
from accel_train.data.tools.few_bits import depth_notes
from accel_train.data.tools.pool import ProgressDisplay, in_processes, jobs_of
from accel_train.errors import UserError, print_line
from accel_train.files import check_writable

SHOWN = 10  # unreadable images that are printed with their reason

Unreadable = tuple[str, str]
"""Name of the image, and why it cannot be read."""


def check_data(data: Data, output: Path | None, processes: int) -> int:
    """Decode all images of `data` in `processes` processes; list the unreadable ones in the file `output`.

    None: in the file `default_list`. The list is written whole or not at all, also if it names no image. Returns the
    number of mistakes: unreadable images, and one if the data cannot be trained on. Raises UserError.
    """
    output = output or default_list(data)
    try:
        check_writable(output)
    except OSError as error:
        raise UserError(
            f"the list {output} cannot be written ({error.strerror or error}): choose another place."
        ) from error
    whole = replace(data, skip_unreadable=None, val_fraction=0.0, test_fraction=0.0, train_limit=None, test_limit=None)
    splits = read_splits(whole)
    if splits.mistake:
        print_line(f"error: {splits.mistake}")
    splits = divide(splits, whole, seed=0)
    sources = [source for source in (splits.to_train_on, splits.validation, splits.test) if source is not None]
    total = sum(map(len, sources))
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if not isinstance(splits.train, EncodedImages):
        print_line(f"The {total} images of '{data.name}' are not files: there is nothing to decode.")
        return 0
    check_own_list(output, whole, splits.sources)
    for note in (*splits.notes, *depth_notes(splits.train)):
        print_line(f"warning: {note}")
    if splits.ignored:
        print_line(f"Not used: {splits.ignored}.")
    unreadable: list[Unreadable] = []
    with ProgressDisplay(console, "decod", total) as shown:
        for count, bad in in_processes(find_unreadable, sources, jobs_of(sources), processes):
            unreadable += bad
            shown.advance(count, len(unreadable))
    write_list(output, whole, splits.sources, (name for name, _ in unreadable))
    print_unreadable(unreadable)
    if unreadable:
        print_line(
            f"{len(unreadable)} of {total} images cannot be read. They are listed in {output}. Leave them out with"
        )
        options = f"--data.name {shlex.quote(data.name)} --data.root {shlex.quote(str(data.root))}"
        options += f" --data.skip-unreadable {shlex.quote(str(output))}"
        print_line(f"  accel-train train RECIPE {options}", wraps=False)
    else:
        print_line(f"All {total} images can be read.")
    return len(unreadable) + bool(splits.mistake)


def find_unreadable(source: Source, first: int, last: int) -> tuple[int, list[Unreadable]]:
    """Return (number of images tried, those that cannot be read) of images first..last-1."""
    unreadable = []
    for id in range(first, last):
        try:
            source.fetch([id])
        except UserError as error:
            unreadable.append((source.name(id), str(error.__cause__ or error)))
    return last - first, unreadable


def print_unreadable(unreadable: list[Unreadable]) -> None:
    """Print the first unreadable images, with the reasons."""
    for name, why in sorted(unreadable)[:SHOWN]:
        print_line(f"  {name}: {why}")
    if len(unreadable) > SHOWN:
        print_line(f"  … and {len(unreadable) - SHOWN} more.")
