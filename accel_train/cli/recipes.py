"""Before a training: `accel-train recipes`, `preview`, `find-lr`, `bench` and `init`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from accel_train.cli.common import RecipeOptions, importing, print_table
from accel_train.config.checks import check_root
from accel_train.config.declaration import POSITIVE, Bound, Word, ending
from accel_train.config.options import CommandOptions, parse_command, parse_command_of_recipe
from accel_train.config.recipe import read_recipe, recipe_names
from accel_train.config.schema import Config, value
from accel_train.errors import LOGGER, UserError, counted, print_line, raise_mistakes, writing
from accel_train.files import atomic_write, check_writable, read_regular_file
from accel_train.launch.environment import prepare_environment


@dataclass(frozen=True)
class Recipes(CommandOptions):
    """List the recipes that come with the package, or print the file of one."""

    name: Annotated[str, Word("[NAME]")] = ""
    """The recipe to print."""


def recipes(arguments: Sequence[str]) -> int:
    """Run `accel-train recipes`; return the exit code."""
    options, _ = parse_command(Recipes, arguments)
    if options.name:
        recipe = read_recipe(options.name)
        raise_mistakes(recipe.mistakes)
        for line in recipe.text.rstrip("\n").split("\n"):
            print_line(line)
    else:
        print_table(["recipe", "data", "model", "reproduces", "expected accuracy"], _rows())
    return 0


def _rows() -> list[list[str]]:
    rows = []
    for name in recipe_names():
        recipe, default = read_recipe(name), Config()
        data, model = (
            " ".join(recipe.options[key].values) if key in recipe.options else value(default, key)
            for key in ("data.name", "model.name")
        )
        rows.append([name, data, model, recipe.about.get("reproduces", ""), recipe.about.get("accuracy", "")])
    return rows


@dataclass(frozen=True, kw_only=True)
class Preview(RecipeOptions):
    """Write a picture of what the model of a recipe will see: images cropped, augmented, mixed, with their labels.

    Options of train (--augment.policy, --data.root, …) change the recipe. Nothing is trained.
    """

    images: Annotated[int, POSITIVE] = 8
    """How many training images to show."""
    output: Path | None = None
    """The PNG file to write; default: preview-RECIPE.png."""


def preview(arguments: Sequence[str]) -> int:
    """Run `accel-train preview`; return the exit code."""
    options, config = parse_command_of_recipe(Preview, arguments)
    launch = prepare_environment()
    check_root(config.data)
    with importing(config.recipe):
        from accel_train.tools.report.preview import preview

    result = preview(launch, config, options.output or Path(f"preview-{config.recipe}.png"), images=options.images)
    print_line(f"preview: {result.path}")
    return 0


@dataclass(frozen=True, kw_only=True)
class FindLr(RecipeOptions):
    """Train for some updates while the learning rate grows, and draw the loss: where it falls fastest is a good rate.

    Options of train (--batch-size, --optim.name, …) change the recipe. Nothing is kept but the picture.
    """

    updates: Annotated[int, Bound("a number of at least 10", lambda x: x >= 10)] = 100
    """How many updates, at least 10. The rate grows by the same factor at each, from 1e-6 to 10."""
    output: Annotated[Path | None, ending(".svg")] = None
    """The picture, as SVG; default: lr-RECIPE.svg."""


def find_lr(arguments: Sequence[str]) -> int:
    """Run `accel-train find-lr`; return the exit code: 1 if the loss does not fall."""
    options, config = parse_command_of_recipe(FindLr, arguments)
    output = options.output or Path(f"lr-{config.recipe}.svg")
    launch = prepare_environment()
    if launch.rank == 0:
        check_writable("--output", output)
    if launch.world_size == launch.local_world_size:
        check_root(config.data)
    with importing(config.recipe):
        from accel_train.launch.agreement import end_world
        from accel_train.tools.find_lr import find_lr, plot

    found = find_lr(launch, config, updates=options.updates)
    end_world()
    if launch.rank != 0:
        return 0
    try:
        with writing("--output", output):
            plot(found, output)
        print_line(f"picture: {output}")
    except UserError as error:
        LOGGER.warning(str(error))
    if found.steepest is None:
        print_line("The loss does not fall: look at the data and the recipe.")
        return 1
    print_line(f"It falls fastest at {found.steepest:.2g}. Try --optim.lr {found.steepest:.2g}, with a warm-up.")
    return 0


@dataclass(frozen=True, kw_only=True)
class Bench(RecipeOptions):
    """Measure how close a recipe's training comes to the device's limit, and where the rest of the time goes.

    Measures, in turns: a bare loop on tensors in the device's memory, the input alone, and the whole trainer. Options
    of train (--batch-size, --data.root, …) change the recipe. With several processes: accelerate launch … -m
    accel_train bench RECIPE. The exit code does not depend on the speed.
    """

    rounds: Annotated[int, POSITIVE] = 5
    """Number of times that everything is measured, in turns."""
    updates: Annotated[int | None, POSITIVE] = None
    """Updates of each measurement; default: those of the bare loop in 5 seconds, at least 20."""
    output: Path | None = None
    """JSON file of all measurements; default: bench-RECIPE.json. The runs are kept beside it while they are needed."""


def bench(arguments: Sequence[str]) -> int:
    """Run `accel-train bench`; return the exit code."""
    options, config = parse_command_of_recipe(Bench, arguments)
    output = options.output or Path(f"bench-{config.recipe}.json")
    if output.is_dir():
        raise UserError(f"--output: {output} is a folder; name a file in it.")

    launch = prepare_environment()
    if launch.world_size == launch.local_world_size:
        try:
            check_root(config.data)
        except UserError as error:
            raise UserError(f"{error} Or measure on synthetic images: --data.name synthetic.") from error
    with importing(config.recipe):
        from accel_train.launch.agreement import end_world
        from accel_train.tools.bench import bench

    results = bench(launch, config, output.parent, rounds=options.rounds, updates=options.updates)
    end_world()
    if launch.rank == 0:
        print_results(results)
        with writing("--output", output):
            output.write_text(json.dumps(results, indent=2) + "\n")
        print_line(f"All measurements: {output}")
    return 0


def print_results(results: dict[str, Any]) -> None:
    """Print the tables. `results`: those of `bench`."""
    names, ratios = {"limit": "limit (bare loop)", "input": "input alone"}, results["ratios"]
    rows = []
    for key, rate in results["images_per_second"].items():
        share = ratios.get(f"{key}/limit")
        rows.append([names.get(key, key), *_cells(rate, "{:,.0f}"), *(_cells(share, "{:,.1%}") if share else ["", ""])])
    print_line("")
    head = ["", "images/s", "quartiles", "of the limit", "quartiles "]
    print_table(head, rows, numbers=head[1:])

    update = results["update_seconds"]["median"]
    print_line("")
    rows = [[name, f"{share * update * 1e3:.3f}", f"{share:.1%}"] for name, share in results["shares"].items()]
    print_table(["an update", "ms", "share"], [*rows, ["in all", f"{update * 1e3:.3f}", ""]], numbers=["ms", "share"])
    print_line("")
    print_line(f"A checkpoint stops the training for {results['save_seconds'] * 1e3:.3g} ms")
    print_line(
        f"{counted(results['processes'], 'process')} on {results['device']}, {results['precision']}; "
        f"{results['division']}; {results['rounds']} rounds of {results['updates']} updates, in turns, "
        f"after {results['warm_up_updates']} updates of warm-up"
    )


def _cells(measured: dict[str, Any], form: str) -> list[str]:
    low, high = form.format(measured["low"]), form.format(measured["high"])
    return [form.format(measured["median"]), f"{low} - {high}"]


@dataclass(frozen=True)
class Init(CommandOptions):
    """Write accelerate's config files, job scripts for Slurm and PBS, and a commented recipe into a folder.

    Existing files are never overwritten: if one of them differs, nothing is written. If there is no .venv in the
    folder, it becomes a link to the virtual environment of this program, which the job scripts activate.
    """

    dir: Annotated[Path, Word("DIR")]
    """The folder; it is created if it does not exist."""


STARTER = Path(__file__).parents[1] / "starter"
"""Has the recipe and, in a wheel, the folders (setup.py). In a checkout these are at the top of the repository."""
FOLDERS = ("accelerate_configs", "slurm", "pbs")


def starter_files() -> dict[str, Path]:
    """Return the files that `init` writes: path in the user's folder -> the file to copy."""
    top = STARTER if (STARTER / FOLDERS[0]).is_dir() else STARTER.parents[1]
    kinds = (".yaml", ".sbatch", ".pbs")
    sources = [path for folder in FOLDERS for path in sorted((top / folder).iterdir()) if path.suffix in kinds]
    files = {path.relative_to(top).as_posix(): path for path in sources}
    return files | {"recipe.yaml": STARTER / "recipe.yaml", ".gitignore": STARTER / "gitignore"}


def init(arguments: Sequence[str]) -> int:
    """Run `accel-train init`; return the exit code."""
    options, _ = parse_command(Init, arguments)
    folder = options.dir.expanduser()
    files = starter_files()
    if os.path.lexists(folder / ".gitignore"):
        del files[".gitignore"]
    contents = {folder / name: read_regular_file(path, follow=True) for name, path in files.items()}
    if different := [str(path) for path, content in contents.items() if _differs(path, content)]:
        raise UserError(
            f"accel-train init: nothing was written, because these exist and differ from what would be written: "
            f"{', '.join(different)}. Move them away, or name another folder."
        )
    new = [path for path in contents if not path.exists()]
    with writing("DIR", folder, "another folder"):
        for path in new:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, contents[path])
    environment = _link_environment(folder)
    print_line(f"{folder}: wrote {counted(len(new), 'file')}; {len(contents) - len(new)} were there already")
    print_line("  accelerate_configs/   where to train: devices, processes, precision")
    print_line("  slurm/  pbs/          job scripts; edit the first lines and the block ENVIRONMENT of yours")
    print_line("  recipe.yaml           what to learn, with an explanation of each option")
    if environment:
        print_line(f"  .venv                 a link to {environment}, which the job scripts activate")
    there = "" if folder == Path() else f" cd {shlex.quote(str(folder))} &&"
    print_line(f"Next:{there} accel-train train recipe.yaml")
    return 0


def _differs(path: Path, content: bytes) -> bool:
    """Whether something other than this `content` is in the place of a file that is to be written."""
    try:
        return os.path.lexists(path) and read_regular_file(path, follow=True) != content
    except OSError:
        return True


def _link_environment(folder: Path) -> str | None:
    """Link folder/.venv to this program's virtual environment, and return its path; None if there is none to link."""
    link = folder / ".venv"
    if sys.prefix == sys.base_prefix or not Path(sys.prefix, "bin", "activate").is_file() or os.path.lexists(link):
        return None
    try:
        link.symlink_to(sys.prefix)
    except OSError:  # a file system without links: the user activates it in the job script
        return None
    return sys.prefix
