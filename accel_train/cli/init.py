"""`accel-train init`: a folder to work in, for those who installed the package and have no checkout."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from accel_train.config.declaration import Word
from accel_train.config.options import CommandOptions, parse_command
from accel_train.errors import UserError, counted, print_line
from accel_train.files import atomic_write
from accel_train.starter import GITIGNORE, RECIPE, starter_files
from accel_train.untrusted import read_regular_file


@dataclass(frozen=True)
class Init(CommandOptions):
    """Write accelerate's config files, job scripts for Slurm and PBS, and a commented recipe into a folder.

    Existing files are never overwritten: if one of them differs, nothing is written. If there is no .venv in the
    folder, it becomes a link to the virtual environment of this program, which the job scripts activate.
    """

    dir: Annotated[Path, Word("DIR")]
    """The folder; it is created if it does not exist."""


def init(arguments: Sequence[str]) -> int:
    """Run `accel-train init`; return the exit code."""
    options, _ = parse_command(Init, arguments)
    folder = options.dir.expanduser()
    files = starter_files()
    if os.path.lexists(folder / GITIGNORE):
        del files[GITIGNORE]
    contents = {folder / name: read_regular_file(path, follow=True) for name, path in files.items()}
    if different := [str(path) for path, content in contents.items() if _differs(path, content)]:
        raise UserError(
            f"accel-train init: nothing was written, because these exist and differ from what would be written: "
            f"{', '.join(different)}. Move them away, or name another folder."
        )
    new = [path for path in contents if not path.exists()]
    try:
        for path in new:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, contents[path])
    except OSError as error:
        raise UserError(
            f"accel-train init: cannot write into {folder} ({error.strerror}: {error.filename}). No file is "
            "incomplete, and the same command writes those that are missing."
        ) from error
    environment = _link_environment(folder)
    print_line(f"{folder}: wrote {counted(len(new), 'file')}; {len(contents) - len(new)} were there already")
    print_line("  accelerate_configs/   where to train: devices, processes, precision")
    print_line(
        "  slurm/  pbs/          job scripts; edit the first lines and the block ENVIRONMENT of the one that you use"
    )
    print_line(f"  {RECIPE}           what to learn, with an explanation of each option")
    if environment:
        print_line(f"  .venv                 a link to {environment}, which the job scripts activate")
    there = "" if folder == Path() else f" cd {shlex.quote(str(folder))} &&"
    print_line(f"Next:{there} accel-train train {RECIPE}")
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
