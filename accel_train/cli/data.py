"""`accel-train check-data` and `shards`: the images of a dataset, before training."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from accel_train.cli.common import importing
from accel_train.config.declaration import CHANNELS, PART, POSITIVE, RANGE, SIZE, Word
from accel_train.config.options import CommandOptions, parse_command, parse_settings
from accel_train.config.recipe import recipe_names
from accel_train.config.schema import Data
from accel_train.data.sources.root import check_root
from accel_train.errors import UserError, print_line
from accel_train.user_code.reference import resolve


@dataclass(frozen=True, kw_only=True)
class _Data(CommandOptions):
    name: Annotated[str, Word("NAME")]
    """Name of the data: folder, csv, or another one as in --data.name."""
    root: Path = Path("data")
    """Folder, file or URL of the data, as in --data.root."""
    image_column: str | None = None
    """csv and hfds: the column of the images, as in --data.image-column."""
    label_column: str | None = None
    """csv and hfds: the column of the labels, as in --data.label-column."""
    stage: Path | None = None
    """Copy the files of root, a URL or a slow path, to this folder first, as --data.stage does."""

    def data(self) -> Data:
        """The data as train has it. All options here that have the name of one of `--data` mean the same."""
        return Data(**{each.name: getattr(self, each.name) for each in fields(Data) if hasattr(self, each.name)})


@dataclass(frozen=True, kw_only=True)
class _Images(_Data):
    range: Annotated[tuple[float, float] | None, RANGE] = None
    """The values of black and white in images of more than 8 bits, as in --data.range."""
    max_pixels: Annotated[int, POSITIVE] = Data.max_pixels
    """Count larger images as unreadable, as --data.max-pixels does."""
    processes: Annotated[int | None, POSITIVE] = None
    """Processes that read or decode; default: all cores."""


@dataclass(frozen=True, kw_only=True)
class CheckData(_Images):
    """Find what blocks or spoils a training: unreadable images, empty classes, images in two splits or with two labels.

    Every image is decoded once. What was found is printed and written to a JSON file. Give the list of unreadable
    images to training as --data.skip-unreadable. The exit code is 1 if a training would end with an error: because of
    unreadable images, class folders without any, or rows of a table without files.

    It copies the files to the node if a training would (--stage), and makes their index, so that no training has to.
    The options of train are taken, too: `check-data RECIPE --data.root DIR` looks at the data that train would use.
    """

    TRAIN_OPTIONS = ("",)

    name: Annotated[str, Word("[NAME|RECIPE]")] = ""
    """Name of the data: folder, csv, or another one as in --data.name; or a recipe, whose data is meant."""
    output: Path | None = None
    """List of unreadable images, a path a line; default: unreadable-NAME.txt, NAME of the data's folder or file."""
    json: Path | None = None
    """The JSON file; default: audit-NAME.json beside the list."""
    strict: bool = False
    """Exit with 1 if anything was found, such as an image in two splits."""


@dataclass(frozen=True, kw_only=True)
class Shards(_Images):
    """Write a dataset as WebDataset shards, tar files that are read from their beginning to their end, into OUTPUT.

    Train on it with --data.name wds --data.root OUTPUT: images, labels, classes and splits are the same. Image files
    are copied, arrays become PNG; or images are made smaller. The samples are shuffled, because shards of a single
    class make bad batches for a reader that has only a few shards at a time. OUTPUT is complete or absent.
    """

    output: Annotated[Path, Word("OUTPUT")]
    """The folder to write: a new or an empty one."""
    shard_size: Annotated[str, SIZE] = "256MB"
    """Largest size of a shard, such as 64MB or 1GB."""
    encoding: Literal["copy", "jpeg", "raw"] = "copy"
    """copy: the images' own files; jpeg: made smaller, quality 90; raw: made smaller and stored as pixels in PPM files,
    the fastest to read, with ten times the space of jpeg. raw keeps the order of the data."""
    short_side: Annotated[int | None, POSITIVE] = None
    """jpeg and raw: shrink larger images to this short side, in pixels; the whole image is kept. Default: 256."""
    channels: Annotated[int, CHANNELS] = Data.channels
    """jpeg and raw: 3 or 1, as in --data.channels: 1 converts images to greyscale."""
    keep_order: bool = False
    """Keep the order of the data, so that a training on the shards has the same batches as one on the data."""
    seed: int = 0
    """The order, and the division into splits, as --seed of a training."""
    val_fraction: Annotated[float, PART] = 0.0
    """Write this fraction of the training samples as validation split, as --data.val-fraction takes them."""
    test_fraction: Annotated[float, PART] = 0.0
    """Write this fraction as test split, as --data.test-fraction takes them."""
    skip_unreadable: Path | None = None
    """Leave out the images in this list, as in --data.skip-unreadable."""


def check_data(arguments: Sequence[str]) -> int:
    """Run `accel-train check-data`; return the exit code."""
    options, words = parse_command(CheckData, arguments)
    data = _data_to_check(options, words)
    check_root(data)
    with importing(data.name):
        from accel_train.tools import audit

    result = audit.check_data(
        data, output=options.output, json_file=options.json, processes=options.processes, shows_progress=True
    )
    for text, wraps in audit.summary(result):
        print_line(text, wraps=wraps)
    return int(result.stops_training or (options.strict and bool(result.findings)))


def _data_to_check(options: CheckData, words: Sequence[str]) -> Data:
    """Return the data that train would use, with the `words` of its options. Raises UserError."""
    is_recipe = options.name in recipe_names() or options.name.endswith((".yaml", ".yml"))
    if not (options.name or any(word.startswith("--data.name=") for word in words)):
        raise UserError("accel-train check-data: NAME is missing: give the name of the data, or a recipe.")
    own, default = options.data(), CheckData().data()
    given = {each.name: getattr(own, each.name) for each in fields(Data)}
    given = {name: value for name, value in given.items() if value != getattr(default, name)}
    if is_recipe or not options.name:
        given.pop("name", None)
    return parse_settings(options.name if is_recipe else {}, words, {"data": given}).data


def shards(arguments: Sequence[str]) -> int:
    """Run `accel-train shards`; return the exit code."""
    options, _ = parse_command(Shards, arguments)
    changes = {"short-side": options.short_side, "range": options.range, "channels": {3: None}.get(options.channels, 1)}
    if options.encoding == "copy" and (given := [name for name, value in changes.items() if value is not None]):
        raise UserError(f"--{given[0]}: files are copied as they are; add --encoding jpeg or --encoding raw.")
    check_root(options.data())
    with importing(options.name):
        from accel_train.tools.shards import SHORT_SIDE, write_shards

    written = write_shards(
        replace(options.data(), name=resolve("data.name", options.name, Path.cwd())),
        options.output,
        shard_size=options.shard_size,
        encoding=options.encoding,
        short_side=options.short_side or SHORT_SIDE,
        keep_order=options.keep_order,
        seed=options.seed,
        processes=options.processes,
        shows_progress=True,
    )
    size = f"{written.shards:,} shard{'s' * (written.shards != 1)}, {written.bytes / 1e9:.3f} GB"
    print_line(f"{written.images:,} images in {size}. Train on them with")
    print_line(f"  accel-train train RECIPE {shlex.join(written.options)}", wraps=False)
    return 0
