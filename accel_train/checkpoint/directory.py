"""Checkpoint directories that are complete or absent: `update-00001234/` in the folder of a run's checkpoints.

A directory is filled under a temporary name beside its final place. The size and SHA-256 of every file are written to
`manifest.json`, everything is flushed to the disk, and one rename moves the directory to its place. A process that is
killed at any moment leaves either the complete directory or a hidden one that nobody reads. Deletion is the same
backwards.

    update-00001234            complete, unless it was altered later: `verify_files` finds out
    update-00001234.broken-1   `quarantine` renamed it because it was altered; kept for inspection
    .update-00001234.*.tmp     is being written      \
    .update-00001234.gone      is being deleted       } if the process was killed, `remove_leftovers` cleans up
    .update-00001234.old       is being replaced     /
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from accel_train.errors import UserError
from accel_train.files import fsync, open_to_write, sha256
from accel_train.untrusted import (
    NotRegularFileError,
    is_count,
    is_file_name,
    parse_json,
    read_regular_file,
    require_regular_file,
)

MANIFEST = "manifest.json"


class BrokenError(Exception):
    """A checkpoint directory is incomplete or altered; the message names the file."""


def checkpoint_path(folder: Path, update: int) -> Path:
    """The directory of the checkpoint of `update` (eight digits or more, so that names sort as numbers do)."""
    return folder / f"update-{update:08d}"


def list_updates(folder: Path) -> list[int]:
    """The updates that have a checkpoint in `folder`, in ascending order. The checkpoints are not verified."""
    if not folder.is_dir():
        return []
    matches = (re.fullmatch(r"update-([0-9]{8,})", path.name) for path in folder.iterdir())
    updates = (int(match[1]) for match in matches if match)
    return sorted(update for update in updates if checkpoint_path(folder, update).exists())  # not update-000000001


def commit(
    folder: Path, update: int, write: Callable[[Path], None], *, check: Callable[[], None] = lambda: None
) -> Path:
    """Let `write` fill a directory with files, then move it to its place. Returns the path of that place.

    An older checkpoint of the same update is replaced. `check` is called right before the rename and may prevent it
    by raising an error. Raises whatever `write`, `check` or the file system (OSError) raises; then nothing has
    changed, except for files that `remove_leftovers` removes. The folder is created, its parent is not: if a mount
    has disappeared, nothing must be written in its place.
    """
    place = checkpoint_path(folder, update)
    # A unique name, because a process that has lost the run to this one may still be writing.
    temporary = folder / f".{place.name}.{uuid.uuid4().hex[:8]}.tmp"
    old = folder / f".{place.name}.old"
    folder.mkdir(exist_ok=True)
    temporary.mkdir()
    try:
        write(temporary)
        files = sorted(path for path in temporary.iterdir())
        entries = {path.name: {"size": path.stat().st_size, "sha256": sha256(path)} for path in files}
        manifest = temporary / MANIFEST
        with open_to_write(manifest, "xb") as file:
            file.write(f"{json.dumps({'files': entries}, indent=1)}\n".encode())
        for path in (*files, manifest, temporary):
            fsync(path)
        check()
        if place.exists():
            place.rename(old)
        temporary.rename(place)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk gets its space back
        if old.exists() and not place.exists():
            old.rename(place)
        raise
    fsync(folder)
    shutil.rmtree(old, ignore_errors=True)
    return place


def check_can_commit(folder: Path) -> None:
    """Write a directory and a file in it, as `commit` does, and remove both. Raises OSError if that is impossible.

    The folder is created, and stays.
    """
    folder.mkdir(exist_ok=True)
    temporary = folder / ".update-probe.tmp"  # a name that `remove_leftovers` would remove
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        with open_to_write(temporary / "probe", "xb") as file:
            file.write(bytes(4096))  # an empty file needs no space on a full disk
        fsync(temporary / "probe")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def verify_files(checkpoint: Path, only: str | None = None) -> set[str]:
    """Check that all files of `checkpoint` (or just the file `only`) are as they were committed.

    Returns the names of all files in the manifest. Raises BrokenError if a file is missing or altered; OSError if a
    file cannot be read at the moment or may not be read, which does not mean that it is broken; UserError for what no
    accident produces: a manifest that names files elsewhere, or something that is not an ordinary file.
    """
    manifest = checkpoint / MANIFEST
    try:
        entries = parse_json(read_regular_file(manifest))["files"]
        expected = {name: (entry["size"], str(entry["sha256"])) for name, entry in entries.items()}
        if not all(is_count(size) for size, _ in expected.values()):
            raise ValueError("a size is not a number")
        names = set(expected)
        if only is not None:
            expected = {only: expected[only]}
    except FileNotFoundError:
        raise BrokenError(f"{manifest} is missing") from None
    except NotRegularFileError as error:
        raise _untrusted(checkpoint, str(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenError(f"{manifest} is altered ({error!r})") from None
    for name in names:
        if not is_file_name(name):
            raise _untrusted(checkpoint, f"{manifest} names {name!r}, which is not in this folder")
    if not names:
        raise _untrusted(checkpoint, f"{manifest} names no file")
    for name, (size, digest) in expected.items():
        _verify_file(checkpoint / name, size, digest)
    return names


def _verify_file(path: Path, size: int, digest: str) -> None:
    """Check the size in bytes and the SHA-256 of a file; raises as `verify_files` does."""
    try:
        if (actual_size := require_regular_file(path).st_size) != size:
            raise BrokenError(f"{path} has {actual_size} bytes instead of {size}")
        if sha256(path) != digest:
            raise BrokenError(f"{path} is altered (its SHA-256 differs from the manifest's)")
    except FileNotFoundError:
        raise BrokenError(f"{path} is missing") from None
    except NotRegularFileError as error:
        raise _untrusted(path.parent, str(error)) from None
    except OSError as error:
        if error.errno == errno.EIO:
            raise BrokenError(f"{path} is on a damaged part of the disk ({error.strerror})") from None
        raise


def _untrusted(checkpoint: Path, what: str) -> UserError:
    return UserError(
        f"{what}: accel-train did not write that. If you do not trust {checkpoint}, delete it; the previous checkpoint "
        "is used then."
    )


def quarantine(checkpoint: Path) -> Path:
    """Rename a broken directory so that it is ignored from now on; return its new path. Raises OSError."""
    number = 1
    while (renamed := checkpoint.with_name(f"{checkpoint.name}.broken-{number}")).exists():
        number += 1
    checkpoint.rename(renamed)
    fsync(checkpoint.parent)
    return renamed


def delete_checkpoint(folder: Path, update: int) -> None:
    """Delete the checkpoint of `update`; at no moment is a part of it visible. Raises OSError."""
    place = checkpoint_path(folder, update)
    gone = folder / f".{place.name}.gone"
    shutil.rmtree(gone, ignore_errors=True)
    place.rename(gone)
    shutil.rmtree(gone)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left in `folder`. Only when no other process writes there. Raises OSError."""
    for path in folder.glob(".update-*"):
        place = folder / path.name[1:].rpartition(".")[0]
        if path.suffix == ".old" and not place.exists():  # killed between the two renames of a replacement
            path.rename(place)
        elif path.suffix in (".tmp", ".old", ".gone"):
            shutil.rmtree(path)


def updates_to_keep(epochs_done: Mapping[int, int | None], keep: int, best: int | None, every: int | None) -> set[int]:
    """The updates whose checkpoints are kept: the newest `keep`, that of update `best`, and the milestones.

    A milestone ends an epoch whose number is a multiple of `every`. `epochs_done` gives for each update that has a
    checkpoint the number of completed epochs, or None in the middle of an epoch.
    """
    newest = sorted(epochs_done)[-keep:]
    milestones = [update for update, epochs in epochs_done.items() if every and epochs and epochs % every == 0]
    return {*newest, *milestones, *(update for update in epochs_done if update == best)}
