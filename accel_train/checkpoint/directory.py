"""Directories that are whole or not there: `update-00001234/` in a folder of checkpoints.

A directory is filled under another name beside its place, the size and SHA-256 of every file are written to
`manifest.json`, and all is flushed to the disk; then one rename brings it to its place. A process that is
killed at any moment leaves either the whole directory or a hidden one that nobody reads. To delete is the
same backwards.

    update-00001234            whole, unless the disk or somebody altered it later: `verify` tells
    update-00001234.broken-1   `set_aside` found it altered; kept for whoever wants to know why
    .update-00001234.*.tmp     being written        \
    .update-00001234.gone      being deleted         } left by a killed process: `tidy` clears them up
    .update-00001234.old       being replaced       /
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
from accel_train.files import fsync, sha256
from accel_train.untrusted import NotRegularFileError, is_count, is_file_name, read_regular_file, require_regular_file

MANIFEST = "manifest.json"


class BrokenError(Exception):
    """A directory is torn or altered; the message names the file."""


def directory(folder: Path, update: int) -> Path:
    """Where the checkpoint of `update` lies (eight digits or more, so that names sort as numbers do)."""
    return folder / f"update-{update:08d}"


def updates(folder: Path) -> list[int]:
    """The updates that have a directory in `folder`, rising; whether they are whole is not looked at."""
    if not folder.is_dir():
        return []
    matches = (re.fullmatch(r"update-([0-9]{8,})", path.name) for path in folder.iterdir())
    found = (int(match[1]) for match in matches if match)
    return sorted(update for update in found if directory(folder, update).exists())  # not update-000000001


def commit(
    folder: Path, update: int, write: Callable[[Path], None], *, check: Callable[[], None] = lambda: None
) -> Path:
    """Let `write` fill a directory with files, and bring it to its place; return that.

    An older checkpoint of the same update is replaced. `check` is called right before the rename, and may
    forbid it by an error. Raises what `write`, `check` or the file system (OSError) raises; then nothing has
    changed, but for what `tidy` removes. The folder is made, its parent is not: a mount that has gone must
    not be written to as if it were there.
    """
    place = directory(folder, update)
    # A name of its own: a process that has lost the run to this one may still be writing.
    temporary = folder / f".{place.name}.{uuid.uuid4().hex[:8]}.tmp"
    old = folder / f".{place.name}.old"
    folder.mkdir(exist_ok=True)
    temporary.mkdir()
    try:
        write(temporary)
        files = sorted(path for path in temporary.iterdir())
        entries = {path.name: {"size": path.stat().st_size, "sha256": sha256(path)} for path in files}
        manifest = temporary / MANIFEST
        manifest.write_text(json.dumps({"files": entries}, indent=1) + "\n")
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


def probe(folder: Path) -> None:
    """Write a directory and a file in it, as `commit` does, and remove them. Raises OSError if that cannot be done.

    The folder is made, and stays.
    """
    folder.mkdir(exist_ok=True)
    temporary = folder / ".update-probe.tmp"  # `tidy` would remove it
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        file = temporary / "probe"
        file.write_bytes(bytes(4096))  # an empty file needs no room on a full disk
        fsync(file)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def verify(checkpoint: Path, only: str | None = None) -> set[str]:
    """Raise BrokenError unless all files of `checkpoint` (or the `only` one named) are as they were
    committed; return the names of all that were.

    A file that may not be read, or cannot be for now, is no broken one: OSError. Nor is a manifest that no accident
    makes, which names what lies elsewhere, or something that is no ordinary file: UserError.
    """
    manifest = checkpoint / MANIFEST
    try:
        entries = json.loads(read_regular_file(manifest))["files"]
        wanted = {name: (entry["size"], str(entry["sha256"])) for name, entry in entries.items()}
        if not all(is_count(size) for size, _ in wanted.values()):
            raise ValueError("a size is not a number")
        names = set(wanted)
        if only is not None:
            wanted = {only: wanted[only]}
    except FileNotFoundError:
        raise BrokenError(f"{manifest} is missing") from None
    except NotRegularFileError as error:
        raise _foreign(checkpoint, str(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenError(f"{manifest} is altered ({error!r})") from None
    for name in names:
        if not is_file_name(name):
            raise _foreign(checkpoint, f"{manifest} names {name!r}, which is not in this folder")
    if not names:
        raise _foreign(checkpoint, f"{manifest} names no file")
    for name, (size, digest) in wanted.items():
        path = checkpoint / name
        try:
            if (found := require_regular_file(path).st_size) != size:
                raise BrokenError(f"{path} has {found} bytes instead of {size}")
            if sha256(path) != digest:
                raise BrokenError(f"{path} is altered (its SHA-256 is not the manifest's)")
        except FileNotFoundError:
            raise BrokenError(f"{path} is missing") from None
        except NotRegularFileError as error:
            raise _foreign(checkpoint, str(error)) from None
        except OSError as error:
            if error.errno == errno.EIO:
                raise BrokenError(f"{path} is on a bad place of the disk ({error.strerror})") from None
            raise
    return names


def _foreign(checkpoint: Path, what: str) -> UserError:
    return UserError(
        f"{what}: accel-train did not write that. If you do not trust {checkpoint}, delete it; the checkpoint before "
        "it is used then."
    )


def set_aside(checkpoint: Path) -> Path:
    """Rename a broken directory so that it is not looked at again; return its new path. Raises OSError."""
    number = 1
    while (aside := checkpoint.with_name(f"{checkpoint.name}.broken-{number}")).exists():
        number += 1
    checkpoint.rename(aside)
    fsync(checkpoint.parent)
    return aside


def delete(folder: Path, update: int) -> None:
    """Delete the checkpoint of `update`; it is never there in part. Raises OSError."""
    place = directory(folder, update)
    gone = folder / f".{place.name}.gone"
    shutil.rmtree(gone, ignore_errors=True)
    place.rename(gone)
    shutil.rmtree(gone)


def tidy(folder: Path) -> None:
    """Clear up what a killed process left in `folder`; only when no other process writes there. Raises
    OSError."""
    for path in folder.glob(".update-*"):
        place = folder / path.name[1:].rpartition(".")[0]
        if path.suffix == ".old" and not place.exists():  # killed between the two renames of a replacement
            path.rename(place)
        elif path.suffix in (".tmp", ".old", ".gone"):
            shutil.rmtree(path)


def survivors(found: Mapping[int, int | None], keep: int, best: int | None, every: int | None) -> set[int]:
    """The updates whose checkpoints stay, of those `found`.

    These are the newest `keep`, that of update `best`, and those that end an epoch which is a multiple of
    `every`. `found` gives for each update the number of epochs done, or None in the middle of an epoch.
    """
    newest = sorted(found)[-keep:]
    milestones = [update for update, epochs in found.items() if every and epochs and epochs % every == 0]
    return {*newest, *milestones, *(update for update in found if update == best)}
