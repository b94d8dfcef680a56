"""The folder of a run: its name, its creation, and its removal if the run left nothing in it."""

from __future__ import annotations

import contextlib
import itertools
from datetime import datetime
from pathlib import Path

from accel_train.errors import UserError


def new_directory(recipe: str) -> tuple[Path, tuple[Path, ...]]:
    """Create runs/RECIPE/YYYY-MM-DD_HH-MM-SS (local time), or the next free name with a number.

    No other process gets the same folder. Returns it and all folders that were created, the deepest first. Call it on
    one process, and send the result to the others. Raises UserError.
    """
    first = Path("runs") / recipe / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for number in itertools.count(1):
        path = first if number == 1 else first.with_name(f"{first.name}_{number}")
        created = make_directory(path.parent)
        try:
            path.mkdir()
            return path, (path, *created)
        except (FileExistsError, FileNotFoundError):  # or another start has just removed the empty parent
            continue
        except OSError as error:
            raise cannot_be_written(path, error) from error
    raise AssertionError


def make_directory(path: Path) -> tuple[Path, ...]:
    """Create a folder and its parents; return those that were missing, the deepest first. Raises UserError."""
    try:
        missing = tuple(folder for folder in (path, *path.parents) if not folder.exists())
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_be_written(path, error) from error
    return missing


def cannot_be_written(path: Path, error: OSError) -> UserError:
    """The error to raise if the folder of a run cannot be created or written."""
    if isinstance(error, FileExistsError):
        return UserError(f"--output-dir: {path} is a file, not a folder. Give another folder.")
    return UserError(f"--output-dir: {path} cannot be written ({error.strerror}). Give another folder.")


def remove_empty(folders: tuple[Path, ...]) -> None:
    """Remove those of the folders that are empty. They must be given with the deepest first."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
