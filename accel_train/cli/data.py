"""`accel-train check-data` and `shards`: the images of a dataset, before training."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from accel_train.cli.common import importing
from accel_train.config.checks import check_root
from accel_train.config.declaration import POSITIVE, SIZE, Word
from accel_train.config.options import CommandOptions, parse_command, parse_settings
from accel_train.config.recipe import recipe_names
from accel_train.config.schema import Config
from accel_train.errors import UserError, counted, print_line


@dataclass(frozen=True, kw_only=True)
class CheckData(CommandOptions):
    """Find what blocks or spoils a training: unreadable images, empty classes, images in two splits or with two labels.

    Every image is decoded once. What was found is printed and written to a JSON file. Give the list of unreadable
    images to training as --data.skip-unreadable. The exit code is 1 if a training would end with an error: because of
    unreadable images, class folders without any, or rows of a table without files.

    The data is that of train with the same options: check-data folder --data.root DIR, or check-data RECIPE. It copies
    the files to the node if a training would (--data.stage), and makes their index, so that no training has to.
    """

    TRAIN_OPTIONS = ("",)

    name: Annotated[str, Word("NAME|RECIPE")]
    """Name of the data: folder, csv, or another one as in --data.name; or a recipe, whose data is meant."""
    output: Path | None = None
    """List of unreadable images, a path a line; default: unreadable-NAME.txt, NAME of the data's folder or file."""
    json: Path | None = None
    """The JSON file; default: audit-NAME.json beside the list."""
    strict: bool = False
    """Exit with 1 if anything was found, such as an image in two splits."""
    processes: Annotated[int | None, POSITIVE] = None
    """Processes that decode; default: all cores."""


@dataclass(frozen=True, kw_only=True)
class Shards(CommandOptions):
    """Write a dataset as WebDataset shards, tar files that are read from their beginning to their end, into OUTPUT.

    Train on it with --data.name wds --data.root OUTPUT: images, labels, classes and splits are the same. Image files
    are copied, arrays become PNG; or images are made smaller. The samples are shuffled, because shards of a single
    class make bad batches for a reader that has only a few shards at a time. OUTPUT is complete or absent.

    The data is that of train with the same options: shards folder OUTPUT --data.root DIR.
    """

    TRAIN_OPTIONS = ("data.", "seed")

    name: Annotated[str, Word("NAME|RECIPE")]
    """Name of the data: folder, csv, or another one as in --data.name; or a recipe, whose data is meant."""
    output: Annotated[Path, Word("OUTPUT")]
    """The folder to write: a new or an empty one."""
    shard_size: Annotated[str, SIZE] = "256MB"
    """Largest size of a shard, such as 64MB or 1GB."""
    encoding: Literal["copy", "jpeg", "raw"] = "copy"
    """copy: the images' own files; jpeg: made smaller, quality 90; raw: made smaller and stored as pixels in PPM files,
    the fastest to read, with ten times the space of jpeg. raw keeps the order of the data."""
    short_side: Annotated[int | None, POSITIVE] = None
    """jpeg and raw: shrink larger images to this short side, in pixels; the whole image is kept. Default: 256."""
    keep_order: bool = False
    """Keep the order of the data, so that a training on the shards has the same batches as one on the data."""
    processes: Annotated[int | None, POSITIVE] = None
    """Processes that read; default: all cores."""


def check_data(arguments: Sequence[str]) -> int:
    """Run `accel-train check-data`; return the exit code."""
    options, words = parse_command(CheckData, arguments)
    data = _config(options.name, words).data
    check_root(data)
    with importing(data.name):
        from accel_train.tools import audit

    result = audit.check_data(
        data, output=options.output, json_file=options.json, processes=options.processes, shows_progress=True
    )
    for text in audit.summary(result):
        print_line(text)
    return int(result.stops_training or (options.strict and bool(result.findings)))


def _config(name: str, words: Sequence[str]) -> Config:
    """Return what train would use for a data set or a recipe of this name, with the `words` of its options."""
    is_recipe = name in recipe_names() or name.endswith((".yaml", ".yml"))
    return parse_settings(name if is_recipe else {"data": {"name": name}}, words)


def shards(arguments: Sequence[str]) -> int:
    """Run `accel-train shards`; return the exit code."""
    options, words = parse_command(Shards, arguments)
    config = _config(options.name, words)
    data = config.data
    channels = None if data.channels == 3 else data.channels  # as they are, or grey
    changes = {"short-side": options.short_side, "data.channels": channels}
    if options.encoding == "copy" and (given := [name for name, value in changes.items() if value is not None]):
        raise UserError(f"--{given[0]}: files are copied as they are; add --encoding jpeg or --encoding raw.")
    check_root(data)
    with importing(options.name):
        from accel_train.tools.shards import SHORT_SIDE, write_shards

    written = write_shards(
        data,
        options.output,
        shard_size=options.shard_size,
        encoding=options.encoding,
        short_side=options.short_side or SHORT_SIDE,
        keep_order=options.keep_order,
        seed=config.seed,
        processes=options.processes,
        shows_progress=True,
    )
    size = f"{counted(written.shards, 'shard')}, {written.bytes / 1e9:.3f} GB"
    print_line(f"{written.images:,} images in {size}. Train on them with")
    print_line(f"  accel-train train RECIPE {shlex.join(written.options)}")
    return 0
