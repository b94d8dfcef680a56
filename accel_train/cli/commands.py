"""What stands on the command lines of evaluate, predict, bench, check-data, cache-data, scaling and recipes."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from accel_train.cli.imports import importing
from accel_train.config import schema as configuration
from accel_train.config.options import parse, parse_command
from accel_train.config.recipe import read_recipe, recipe_names, recipe_text
from accel_train.errors import UserError
from accel_train.launch.environment import prepare_environment
from accel_train.launch.process import available_cores
from accel_train.records.table import print_table


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a run's model over every sample of a split, exactly once, as its own configuration says.

    --data.KEY VALUE changes the data of the run: another folder, or a limit. With several processes: accelerate
    launch … -m accel_train evaluate RUN. All figures, of each class too, are written to RUN/evaluation-SPLIT.json.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    split: Literal["test", "val", "train"] = "test"
    """Samples to evaluate; those of train as they are, without augmentation."""
    checkpoint: Path | None = None
    """A checkpoint of the run's, such as update-00001234; default: the final model, else the newest checkpoint."""


@dataclass(frozen=True)
class Predict:
    """Show the most probable classes of images, by a run's model.

    An image that cannot be read has a row that says so, and the others go on; the exit code is 1 then.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    images: Annotated[Positional[tuple[Path, ...]], arg(metavar="IMAGE|FOLDER …")]
    """Image files, or folders of them."""
    top_k: int | None = None
    """Number of classes for each image; default: 1 on the console, 5 in a file."""
    output: Path | None = None
    """Write to this .csv or .jsonl file instead of a table on the console."""
    batch_size: int = 64
    """Images in one forward pass."""
    max_pixels: int | None = None
    """Refuse images of more pixels; default: as in training (--data.max-pixels)."""


@dataclass(frozen=True)
class Bench:
    """Measure how near a recipe's training comes to the limit of the device, and where the rest of the time goes.

    In turns: a bare loop on tensors that lie on the device, the input alone, and the trainer with everything on.
    Options of train (--batch-size, --data.root, …) change the recipe. With several processes: accelerate launch …
    -m accel_train bench RECIPE. The exit code says nothing of the speed.
    """

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")]
    """A recipe, as for train."""
    synthetic: bool = False
    """Take synthetic images of the same size, number and classes (of folders: as many as data.classes says)."""
    rounds: int = 5
    """How often all is measured, in turns."""
    updates: int | None = None
    """Updates of each measurement; default: as many as the bare loop does in 5 seconds, at least 20."""
    output: Path | None = None
    """File of all figures, in JSON; default: bench-RECIPE.json. The runs lie beside it as long as they are needed."""


@dataclass(frozen=True)
class Scaling:
    """Compare finished runs of one recipe on different numbers of processes: speed-up and efficiency.

    Writes scaling.csv and scaling.svg beside the first run.
    """

    runs: Positional[tuple[Path, ...]]
    """Folders of the runs."""


@dataclass(frozen=True)
class CheckData:
    """Decode every image of a data set and write the list of those that cannot be read.

    Give the list to training as --data.skip-unreadable. The exit code is 1 if there are any.
    """

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """Name of the data: folder, or another one as in --data.name."""
    root: Path = Path("data")
    """Folder of the data, as in --data.root."""
    output: Path = Path("unreadable.txt")
    """The list that is written: one path a line."""
    max_pixels: int = configuration.Data.max_pixels
    """Count larger images as unreadable, as --data.max-pixels does."""
    processes: int | None = None
    """Processes that decode; default: all cores."""


@dataclass(frozen=True)
class CacheData:
    """Write the images of a data set, decoded and made smaller, into one file that is read many times faster.

    Train on it with --data.name cache --data.root FILE. After a kill the same command goes on where it was. The exit
    code is 1 if images cannot be read: they are listed, and what is done is kept.
    """

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """Name of the data: folder, or another one as in --data.name."""
    output: Path | None = None
    """The file that is written (to be given)."""
    root: Path = Path("data")
    """Folder of the data, as in --data.root."""
    short_side: int = 256
    """The short side of larger images becomes so many pixels; the shape is kept, and all of the image."""
    encoding: Literal["raw", "jpeg"] = "raw"
    """raw: pixels, the fastest to read; jpeg (quality 90): about a tenth of the room."""
    channels: int = 3
    """3 or 1, as in --data.channels: 1 makes them grey."""
    skip_unreadable: Path | None = None
    """Leave out the images that this list names, as in --data.skip-unreadable."""
    max_pixels: int = configuration.Data.max_pixels
    """Count larger images as unreadable, as --data.max-pixels does."""
    processes: int | None = None
    """Processes that decode; default: all cores."""


def evaluate(arguments: Sequence[str]) -> int:
    prog = "accel-train evaluate"
    found, overrides = parse_command(Evaluate, arguments, prog, positional=("run",), others=("data.",))
    _check_run(found.run)

    launch = prepare_environment()  # before torch is imported, which reads some of it
    with importing(str(found.run)):
        from accel_train.analysis.evaluate_run import evaluate_run

    return evaluate_run(launch, found.run, split=found.split, checkpoint=found.checkpoint, overrides=overrides)


def predict(arguments: Sequence[str]) -> int:
    prog = "accel-train predict"
    found, _ = parse_command(Predict, arguments, prog, positional=("run", "images"))
    top_k = found.top_k if found.top_k is not None else 1 if found.output is None else 5
    _at_least_one("top-k", top_k)
    _at_least_one("batch-size", found.batch_size)
    if found.max_pixels is not None:
        _at_least_one("max-pixels", found.max_pixels)
    if found.output is not None and found.output.suffix not in (".csv", ".jsonl"):
        raise UserError(f"--output: expected a name that ends in .csv or .jsonl, found '{found.output}'.")
    _check_run(found.run)
    for image in found.images:
        if not image.exists():
            raise UserError(f"{image}: no such image or folder.")

    launch = prepare_environment()
    with importing(str(found.run)):
        from accel_train.analysis.predict import predict

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `predict … | head` ends quietly
    return predict(
        launch,
        found.run,
        found.images,
        top_k=top_k,
        output=found.output,
        batch_size=found.batch_size,
        max_pixels=found.max_pixels,
    )


def bench(arguments: Sequence[str]) -> int:
    prog = "accel-train bench"
    found, overrides = parse_command(Bench, arguments, prog, positional=("recipe",), others=("",))
    _at_least_one("rounds", found.rounds)
    if found.updates is not None:
        _at_least_one("updates", found.updates)
    config = parse([found.recipe, *overrides], prog)
    for key in ("output-dir", "config-only"):
        if configuration.value(config, key):
            raise UserError(f"--{key}: an option of train; bench writes only the file that --output names.")
    output = found.output or Path(f"bench-{config.recipe}.json")
    if output.is_dir():
        raise UserError(f"--output: {output} is a folder; name a file in it.")

    launch = prepare_environment()
    with importing(config.recipe):
        from accel_train.bench.bench import bench
        from accel_train.launch.accelerator import end_world

    code = bench(config, launch, output, synthetic=found.synthetic, rounds=found.rounds, updates=found.updates)
    end_world()
    return code


def check_data(arguments: Sequence[str]) -> int:
    found, _ = parse_command(CheckData, arguments, "accel-train check-data", positional=("name",))
    processes = _processes(found.processes)
    _at_least_one("max-pixels", found.max_pixels)
    data = configuration.Data(name=found.name, root=found.root, max_pixels=found.max_pixels)

    with importing(found.name):
        from accel_train.data.tools import check

    unreadable = check.check_data(data, found.output, processes)
    return 1 if unreadable else 0


def cache_data(arguments: Sequence[str]) -> int:
    found, _ = parse_command(CacheData, arguments, "accel-train cache-data", positional=("name",))
    processes = _processes(found.processes)
    _at_least_one("short-side", found.short_side)
    _at_least_one("max-pixels", found.max_pixels)
    if found.output is None:
        raise UserError("accel-train cache-data: --output is missing: name the file to be written.")
    if found.channels not in (1, 3):
        raise UserError(f"--channels: expected 1 or 3, found {found.channels}.")
    data = configuration.Data(
        name=found.name,
        root=found.root,
        channels=found.channels,
        skip_unreadable=found.skip_unreadable,
        max_pixels=found.max_pixels,
    )

    with importing(found.name):
        from accel_train.data.tools.cache_writer import write_cache

    unreadable = write_cache(
        data, found.output, short_side=found.short_side, encoding=found.encoding, processes=processes
    )
    return 1 if unreadable else 0


def scaling(arguments: Sequence[str]) -> int:
    found, _ = parse_command(Scaling, arguments, "accel-train scaling", positional=("runs",))

    from accel_train.bench.scaling import compare

    return compare(found.runs)


def recipes(arguments: Sequence[str]) -> int:
    """Lists the packaged recipes, or prints one."""
    if "-h" in arguments or "--help" in arguments:
        print("usage: accel-train recipes [NAME]\n\nList the recipes, or print the file of one.")
    elif len(arguments) > 1 or (arguments and arguments[0].startswith("-")):
        raise UserError(f"accel-train recipes: expected at most one NAME, found {' '.join(arguments)!r}.")
    elif arguments:
        print(recipe_text(arguments[0]), end="")
    else:
        print_table(["recipe", "data", "model", "reproduces", "expected accuracy"], _recipe_rows())
    return 0


def _recipe_rows() -> list[list[str]]:
    rows = []
    for name in recipe_names():
        recipe, default = read_recipe(name), configuration.Config()
        data, model = (
            " ".join(recipe.options[key].values) if key in recipe.options else configuration.value(default, key)
            for key in ("data.name", "model.name")
        )
        rows.append([name, data, model, recipe.about.get("reproduces", ""), recipe.about.get("accuracy", "")])
    return rows


def _at_least_one(key: str, value: int) -> None:
    if value < 1:
        raise UserError(f"--{key}: expected at least 1, found {value}.")


def _processes(asked: int | None) -> int:
    processes = available_cores() if asked is None else asked
    _at_least_one("processes", processes)
    return processes


def _check_run(run: Path) -> None:
    if not (run / "config.yaml").is_file():
        what = "has no config.yaml" if run.is_dir() else "is no folder"
        raise UserError(f"{run}: not a run: it {what}; give the folder that training wrote (runs/RECIPE/…).")
