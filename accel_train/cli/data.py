"""`accel-train check-data` and `accel-train cache-data`: the images of a dataset, before training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from accel_train.cli.common import below_one, importing
from accel_train.config.bounds import out_of_bounds
from accel_train.config.options import CommandOptions, parse_command
from accel_train.config.schema import Config, Data
from accel_train.errors import UserError
from accel_train.launch.process import available_cores


@dataclass(frozen=True)
class CheckData(CommandOptions):
    """Decode every image of a dataset and write the list of those that cannot be read.

    Give the list to training as --data.skip-unreadable. The exit code is 1 if there are unreadable images, or
    class folders without any.
    """

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """Name of the data: folder, csv, or another one as in --data.name."""
    root: Path = Path("data")
    """Folder or file of the data, as in --data.root."""
    output: Path | None = None
    """The list to write, one path a line; default: unreadable-NAME.txt, NAME of the data's folder or file."""
    range: tuple[float, float] | None = None
    """The values of black and white in images of more than 8 bits, as in --data.range."""
    max_pixels: int = Data.max_pixels
    """Count larger images as unreadable, as --data.max-pixels does."""
    processes: int | None = None
    """Processes that decode; default: all cores."""

    def mistakes(self) -> list[str]:
        return below_one(processes=self.processes, max_pixels=self.max_pixels) + _wrong_range(self.range)


@dataclass(frozen=True)
class CacheData(CommandOptions):
    """Decode and shrink the images of a dataset into a single cache file, which is read many times faster.

    Train on it with --data.name cache --data.root FILE. If the command is killed, the same command continues where it
    stopped. If images cannot be read, they are listed, the finished part is kept, and the exit code is 1.
    """

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """Name of the data: folder, csv, or another one as in --data.name."""
    output: Path | None = None
    """The file to write (required)."""
    root: Path = Path("data")
    """Folder or file of the data, as in --data.root."""
    short_side: int = 256
    """Shrink larger images to this short side, in pixels; the whole image is kept."""
    encoding: Literal["raw", "jpeg"] = "raw"
    """raw: pixels, the fastest to read; jpeg (quality 90): about a tenth of the space."""
    channels: int = 3
    """3 or 1, as in --data.channels: 1 converts images to greyscale."""
    range: tuple[float, float] | None = None
    """The values of black and white in images of more than 8 bits, as in --data.range."""
    skip_unreadable: Path | None = None
    """Leave out the images in this list, as in --data.skip-unreadable."""
    max_pixels: int = Data.max_pixels
    """Count larger images as unreadable, as --data.max-pixels does."""
    processes: int | None = None
    """Processes that decode; default: all cores."""

    def mistakes(self) -> list[str]:
        mistakes = below_one(processes=self.processes, short_side=self.short_side, max_pixels=self.max_pixels)
        if self.channels not in (1, 3):
            mistakes.append(f"--channels: expected 1 or 3, found {self.channels}.")
        return mistakes + _wrong_range(self.range)


def _wrong_range(values: tuple[float, float] | None) -> list[str]:
    expected = out_of_bounds(Config(data=Data(range=values))).get("data.range")
    if values is None or expected is None:
        return []
    return [f"--range: expected {expected}, found '{values[0]:g} {values[1]:g}'."]


def check_data(arguments: Sequence[str]) -> int:
    """Run `accel-train check-data`; return the exit code."""
    options, _ = parse_command(CheckData, arguments, "accel-train check-data", positional=("name",))
    data = Data(name=options.name, root=options.root, range=options.range, max_pixels=options.max_pixels)

    with importing(options.name):
        from accel_train.data.tools import check

    mistakes = check.check_data(data, options.output, options.processes or available_cores())
    return 1 if mistakes else 0


def cache_data(arguments: Sequence[str]) -> int:
    """Run `accel-train cache-data`; return the exit code."""
    options, _ = parse_command(CacheData, arguments, "accel-train cache-data", positional=("name",))
    if options.output is None:
        raise UserError("accel-train cache-data: --output is missing: name the file to write.")
    data = Data(
        name=options.name,
        root=options.root,
        channels=options.channels,
        range=options.range,
        skip_unreadable=options.skip_unreadable,
        max_pixels=options.max_pixels,
    )

    with importing(options.name):
        from accel_train.data.tools.cache_writer import write_cache

    unreadable = write_cache(
        data,
        options.output,
        short_side=options.short_side,
        encoding=options.encoding,
        processes=options.processes or available_cores(),
    )
    return 1 if unreadable else 0
