"""The folder of an export: complete or not there, and never in the place of somebody's files."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accel_train.errors import UserError, writing
from accel_train.export.preprocess import FILE
from accel_train.files import fsync, set_default_permissions

FILES = {FILE, "README.md", "model.onnx", "model.onnx.data", "model.pt2", "config.json", "model.safetensors"}
"""All that exports write."""


def check_free(output: Path) -> None:
    """Raise UserError unless `output` does not exist, is empty, or holds nothing but an earlier export."""
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"--output: {output} is a file; name a folder.")
    names = {path.name for path in output.iterdir()}
    if others := sorted(names - FILES):
        raise UserError(f"--output: {output} holds other files ({', '.join(others[:3])}); name another folder.")
    if names and FILE not in names:
        raise UserError(
            f"--output: {output} holds {min(names)}, but is not an export (no {FILE}); name another folder."
        )


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a new folder beside `output`, to be written and given to `put_in_place`; else it is removed.

    Raises UserError if it cannot be created.
    """
    folder = _beside(output, "tmp")
    with writing("--output", output, "another folder"):
        output.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put_in_place(folder: Path, output: Path) -> None:
    """Rename the complete `folder` to `output`; an earlier export there is removed after that. Raises UserError."""
    check_free(output)
    for path in list(folder.iterdir()):
        set_default_permissions(path)
        fsync(path)
    fsync(folder)
    earlier = _beside(output, "old")
    if output.exists():
        output.rename(earlier)
    try:
        folder.rename(output)
    except OSError:
        with suppress(OSError):
            earlier.rename(output)
        raise
    shutil.rmtree(earlier, ignore_errors=True)


def _beside(output: Path, ending: str) -> Path:
    return output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}.{ending}")
