"""The folder of a run: its name, how it is made, and how it is removed if nothing came of the run."""

from __future__ import annotations

import contextlib
import itertools
from datetime import datetime
from pathlib import Path

from accel_train.errors import UserError


def new_directory(recipe: str) -> tuple[Path, tuple[Path, ...]]:
    """Make runs/RECIPE/YYYY-MM-DD_HH-MM-SS (the local time), or the next such name that is free.

    No other process gets the same one. Returns it and all folders that were made, the deepest first. Ask on one
    process, and tell the others. Raises UserError.
    """
    first = Path("runs") / recipe / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for number in itertools.count(1):
        path = first if number == 1 else first.with_name(f"{first.name}_{number}")
        made = make_directory(path.parent)
        try:
            path.mkdir()
            return path, (path, *made)
        except (FileExistsError, FileNotFoundError):  # or another start has just removed the empty parent
            continue
        except OSError as error:
            raise cannot_be_written(path, error) from error
    raise AssertionError


def make_directory(path: Path) -> tuple[Path, ...]:
    """Make a folder and its parents; returns those that were missing, the deepest first. Raises UserError."""
    try:
        missing = tuple(folder for folder in (path, *path.parents) if not folder.exists())
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_be_written(path, error) from error
    return missing


def cannot_be_written(path: Path, error: OSError) -> UserError:
    """The error to raise for the folder of a run."""
    if isinstance(error, FileExistsError):
        return UserError(f"--output-dir: {path} is a file, not a folder; name another one.")
    return UserError(f"--output-dir: {path} cannot be written ({error.strerror}); name another one.")


def remove_empty(folders: tuple[Path, ...]) -> None:
    """Remove those of the folders that are empty; the deepest come first."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
