"""Checkpoint directories that are complete or absent: `update-00001234/` in the folder of a run's checkpoints.

model.safetensors   parameters and buffers under the names of the unwrapped model
ema.safetensors     the same of the EMA, if the run has one
optimizer.pt        the optimizer's state by parameter name; read with weights_only, so that it cannot run code
state.json          position and counts, seed, settings, versions, loss scaler, plateau or own schedule
manifest.json       size and SHA-256 of the others

A directory is filled under a temporary name beside its final place. The manifest is written last, everything is flushed
to the disk, and one rename moves the directory to its place. A process that is killed at any moment leaves either the
complete directory or a hidden one that nobody reads. Deletion is the same backwards.

    update-00001234            complete, unless it was altered later: `verify_files` finds out
    update-00001234.broken-1   `quarantine` renamed it because it was altered; kept for inspection
    .update-00001234.*.tmp     is being written      \
    .update-00001234.gone      is being deleted       } if the process was killed, `remove_leftovers` cleans up
    .update-00001234.old       is being replaced     /
"""

from __future__ import annotations

import contextlib
import errno
import json
import platform
import re
import shutil
import uuid
import zipfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from accel_train.config.compatibility import check_format
from accel_train.errors import UserError, reason_of
from accel_train.files import (
    fsync,
    is_count,
    is_file_name,
    json_object,
    open_to_read,
    open_to_write,
    parse_json,
    read_regular_file,
    require_regular_file,
    set_default_permissions,
    sha256,
)
from accel_train.ownership.owner import is_late

T = TypeVar("T")
MANIFEST = "manifest.json"
PACKAGES = ("accel-train", "torch", "torchvision", "accelerate", "timm", "safetensors")
ATTEMPTS = 3  # to read what a run may delete meanwhile
FILES = ("state.json", "optimizer.pt", "model.safetensors", "ema.safetensors")


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
    file cannot be read at the moment, may not be read or is a link or a pipe, which does not mean that it is broken.
    """
    manifest = checkpoint / MANIFEST
    try:
        entries = parse_json(read_regular_file(manifest))["files"]
        expected = {name: (entry["size"], str(entry["sha256"])) for name, entry in entries.items()}
        if not all(is_count(size) for size, _ in expected.values()):
            raise ValueError("a size is not a number")
        if elsewhere := [name for name in expected if not is_file_name(name)]:
            raise ValueError(f"it names {elsewhere[0]!r}, which is not in this folder")
        names = set(expected)
        if only is not None:
            expected = {only: expected[only]}
    except FileNotFoundError:
        raise BrokenError(f"{manifest} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenError(f"{manifest} is altered ({error!r})") from None
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
    except OSError as error:
        if error.errno == errno.EIO:
            raise BrokenError(f"{path} is on a damaged part of the disk ({error.strerror})") from None
        raise


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


def updates_to_keep(updates: Collection[int], keep: int, best: int | None) -> set[int]:
    """Those of the updates with a checkpoint whose checkpoints are kept: the newest `keep`, and update `best`."""
    return {*sorted(updates)[-keep:], *(update for update in updates if update == best)}


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment. All tensors are complete (not sharded) and in host memory."""

    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    optimizer: dict[str, Any]
    state: dict[str, Any]


def write_checkpoint(folder: Path, snapshot: Snapshot) -> None:
    """Write the files of a checkpoint, except for the manifest, into `folder`. Raises OSError and safetensors' own."""
    for name, weights in (("model", snapshot.model), ("ema", snapshot.ema)):
        if weights is not None:
            # Every name has its own tensor here, so tied weights are stored under each of their names.
            plain = {key: tensor.contiguous() for key, tensor in weights.items()}
            save_file(plain, folder / f"{name}.safetensors", metadata={"format": "pt"})
            set_default_permissions(folder / f"{name}.safetensors")
    torch.save(snapshot.optimizer, folder / "optimizer.pt")
    with open_to_write(folder / "state.json", "xb") as file:
        file.write(f"{json.dumps(snapshot.state, indent=1)}\n".encode())


def read_checkpoint(path: Path) -> Snapshot:
    """Read a checkpoint that `verify_checkpoint` has verified, without running any code that may be in it.

    Raises OSError, as when the run that owns the checkpoint is deleting it. Raises UserError if all files are as they
    were written, but cannot be understood: a disk error cannot cause that, and ignoring the checkpoint silently could
    lose work.
    """
    file = path / "state.json"
    try:
        state = parse_json(read_regular_file(file))
        check_format(file, dict(state).get("format"), state["versions"]["accel-train"])
        file = path / "optimizer.pt"
        optimizer = _load_optimizer(file)
        file = path / "model.safetensors"
        model = load_file(file)
        file = path / "ema.safetensors"
        ema = load_file(file) if file.exists() else None
    except (UserError, OSError):
        raise
    except Exception as error:  # whatever a file with other contents makes of it
        raise not_ours(file, error) from error
    return Snapshot(model, ema, optimizer, state)


def not_ours(file: Path, error: Exception) -> UserError:
    """The error for a file of a checkpoint that is as it was written, but whose content has led to `error`."""
    return UserError(
        f"{file} matches its checksum, but it is not a file of this program ({reason_of(error)}). If you do not trust "
        f"it, delete {file.parent}; the previous checkpoint is used then."
    )


def verify_checkpoint(path: Path) -> None:
    """Verify the files as `verify_files` does; BrokenError, too, if the manifest omits one that must or does exist."""
    names = verify_files(path)
    for name in FILES:
        if name not in names and (name != "ema.safetensors" or (path / name).exists()):
            raise BrokenError(f"{path / MANIFEST} is altered (it does not name {name})")


def _load_optimizer(file: Path) -> Any:
    """Load optimizer.pt. Raises ValueError if it is compressed, which torch.save never does.

    A compressed archive may unpack to any size, or be read beyond its end.
    """
    with open_to_read(file) as opened:
        with zipfile.ZipFile(opened) as archive:
            records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise ValueError("it is compressed")
        opened.seek(0)
        return torch.load(opened, map_location="cpu", weights_only=True)


def versions(packages: Iterable[str] = PACKAGES, missing: str = "unknown") -> dict[str, str]:
    """The versions of Python and of the packages that compute a run; `missing` for a package that is not installed."""
    by_name = {"python": platform.python_version()}
    for name in packages:
        try:
            by_name[name] = version(name)
        except PackageNotFoundError:
            by_name[name] = missing
    return by_name


def find_newest_checkpoint(
    run: Path, set_aside: Callable[[Path, BrokenError], None] = lambda path, error: None
) -> Path | None:
    """The newest complete checkpoint in a run's directory (or in its folder of checkpoints), or None.

    One that an earlier owner wrote after a later one had begun does not count. `set_aside` is called with each newer
    one that does not count, and says why. Raises OSError if the folder or a checkpoint cannot be read.
    """
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    for update in reversed(list_updates(folder)):
        path = checkpoint_path(folder, update)
        try:
            verify_checkpoint(path)
            if is_late(folder.parent, json_object(read_regular_file(path / "state.json")) or {}, update):
                raise BrokenError(f"{path} was written by an earlier owner after a later one had begun")
            return path
        except BrokenError as error:
            set_aside(path, error)
    return None


def choose_checkpoint(folder: Path, resume: str, notes: list[str]) -> tuple[Path, Snapshot] | None:
    """The checkpoint to restore and its contents, or None for a new run. For the owner of the run, on one process.

    `folder`: the run's checkpoints, from which leftovers of a killed run are removed. `resume`: see
    `CheckpointStore.restore`. What the user should know is appended to `notes`. Raises UserError and OSError.
    """
    remove_leftovers(folder)

    def set_aside(path: Path, error: BrokenError) -> None:
        renamed = quarantine(path)
        notes.append(f"broken checkpoint: {error}; renamed to {renamed.name}, the previous one is used")

    newest = find_newest_checkpoint(folder, set_aside)
    own = None if newest is None else (newest, read_checkpoint(newest))
    if resume == "must" and own is None:
        raise UserError(f"{folder} has no complete checkpoint, and --resume is must. Leave it out to begin a new run.")
    if resume in ("auto", "must"):
        return own
    requested, resolved = Path(resume), folder.resolve()
    if own is None:
        return _read_requested(requested)
    if requested.resolve().parent == resolved and requested.resolve() != own[0].resolve():
        raise UserError(
            f"{requested} is not the newest checkpoint of this run: {own[0].name} is. "
            "To resume from an older one, give a new --output-dir."
        )
    if resolved not in (requested.resolve(), requested.resolve().parent, requested.resolve() / "checkpoints"):
        notes.append(f"--resume {requested} is not used, because this run already has its own checkpoints")
    return own


def _read_requested(path: Path) -> tuple[Path, Snapshot]:
    """The checkpoint that --resume names: `path` itself, or the newest complete one of the run in `path`."""

    def read() -> tuple[Path, Snapshot]:
        try:
            checkpoint: Path | None = path
            if path.name.startswith("update-"):
                verify_checkpoint(path)
            else:
                checkpoint = find_newest_checkpoint(path)
            if checkpoint is None:
                raise UserError(
                    f"--resume {path}: there is no complete checkpoint. Give the path of a checkpoint or a run."
                )
            return checkpoint, read_checkpoint(checkpoint)
        except BrokenError as error:
            raise UserError(f"--resume {path}: {error}. Give another checkpoint.") from None

    return read_while_trained(read)


def read_while_trained(read: Callable[[], T]) -> T:
    """Return `read()`, which chooses and reads a checkpoint or weights of a run that may be training.

    If it fails, it is called again, because the run may have deleted what was chosen. Raises what `read` raises: a
    UserError or an OSError.
    """
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(UserError, OSError):
            return read()
    return read()
