"""`accel-train init`: a folder to work in, for those who installed the package and have no checkout."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from accel_train.config.options import CommandOptions, parse_command
from accel_train.errors import UserError, counted, print_line
from accel_train.starter import RECIPE, starter_files
from accel_train.untrusted import read_regular_file


@dataclass(frozen=True)
class Init(CommandOptions):
    """Write accelerate's config files, job scripts for Slurm and PBS, and a commented recipe into a folder.

    Existing files are never overwritten: if one of them differs, nothing is written. If there is no .venv in the
    folder, it becomes a link to the virtual environment of this program, which the job scripts activate.
    """

    dir: Annotated[Positional[Path], arg(metavar="DIR")]
    """The folder; it is created if it does not exist."""


def init(arguments: Sequence[str]) -> int:
    """Run `accel-train init`; return the exit code."""
    options, _ = parse_command(Init, arguments, "accel-train init", positional=("dir",))
    folder = options.dir.expanduser()
    contents = {name: read_regular_file(path, follow=True) for name, path in starter_files().items()}
    new = _missing(folder, contents)
    try:
        _write(folder, {name: contents[name] for name in new})
    except OSError as error:
        raise UserError(
            f"accel-train init: cannot write into {folder}: {error.strerror or error}. No file is incomplete, and the "
            "same command writes those that are missing."
        ) from error
    environment = _link_environment(folder)
    if new:
        print_line(
            f"{folder}: wrote {counted(len(new), 'file')}"
            + (f", {len(contents) - len(new)} existed already" * (new != [*contents]))
        )
        print_line("  accelerate_configs/   where to train: devices, processes, precision")
        print_line("  slurm/  pbs/          job scripts; copy a file of slurm/sites/ to slurm/site.sh and edit it")
        print_line(f"  {RECIPE}           what to learn, with an explanation of each option")
    else:
        print_line(f"{folder}: nothing to do, all {len(contents)} files are there")
    if environment:
        print_line(f"  .venv                 a link to {environment}, which the job scripts activate")
    if new:
        there = "" if folder == Path() else f" cd {shlex.quote(str(folder))} &&"
        print_line(f"Next:{there} accel-train train {RECIPE}")
    return 0


def _missing(folder: Path, contents: dict[str, bytes]) -> list[str]:
    """Return the names of the files that do not exist in `folder`. Raises UserError if one is there and differs."""
    different: dict[str, None] = {}
    missing = []
    for name, content in contents.items():
        path = folder / name
        blocked = next((p for p in (*path.parents[::-1], path) if os.path.lexists(p) and not _fits(p, path)), None)
        if blocked is not None:
            different[str(blocked)] = None
        elif not path.exists():
            missing.append(name)
        elif not _contains(path, content):
            different[str(path)] = None
    if different:
        raise UserError(
            f"accel-train init: nothing was written, because these exist and differ from what would be written: "
            f"{', '.join(different)}. Move them away, or name another folder."
        )
    return missing


def _fits(existing: Path, file: Path) -> bool:
    return existing.is_file() if existing == file else existing.is_dir()


def _contains(path: Path, content: bytes) -> bool:
    try:
        return read_regular_file(path, follow=True) == content
    except OSError:
        return False


def _write(folder: Path, contents: dict[str, bytes]) -> None:
    """Write new files, each of them complete; none if the disk is full. Raises OSError."""
    if not contents:
        return
    folder.mkdir(parents=True, exist_ok=True)
    # A full disk shows while the files are still in a folder of their own.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".accel-train-init-") as staging:
        for number, content in enumerate(contents.values()):
            (Path(staging) / str(number)).write_bytes(content)
        for number, name in enumerate(contents):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(target):
                raise FileExistsError(0, f"{target} was created meanwhile")
            (Path(staging) / str(number)).rename(target)


def _link_environment(folder: Path) -> str | None:
    """Link folder/.venv to this program's virtual environment, and return its path; None if there is none to link."""
    link = folder / ".venv"
    if sys.prefix == sys.base_prefix or not Path(sys.prefix, "bin", "activate").is_file() or os.path.lexists(link):
        return None
    try:
        link.symlink_to(sys.prefix)
    except OSError:  # a file system without links: the user sets site_environment in slurm/site.sh
        return None
    return sys.prefix
