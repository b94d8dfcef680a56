"""What of a run is read: the checkpoint that a start resumes from, and its weights alone.

A start resumes from the newest complete checkpoint of its run, or from the one that --resume names. The weights of a
run are its final ones, or those of a checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from accel_train.checkpoint.directory import (
    BrokenError,
    Snapshot,
    checkpoint_path,
    list_updates,
    quarantine,
    read_checkpoint,
    remove_leftovers,
    verify_checkpoint,
)
from accel_train.checkpoint.state_dict import named_tensors
from accel_train.errors import UserError, reason_of
from accel_train.files import sha256
from accel_train.ownership.owner import is_late, read_result
from accel_train.untrusted import is_count, json_object, read_regular_file, require_regular_file

T = TypeVar("T")
ATTEMPTS = 100  # to read what a run may delete meanwhile


def choose_checkpoint(folder: Path, resume: str, notes: list[str]) -> tuple[Path, Snapshot] | None:
    """The checkpoint to restore and its contents, or None for a new run. For the owner of the run, on one process.

    `folder`: the run's checkpoints, from which leftovers of a killed run are removed. `resume`: see
    `Checkpoints.restore`. What the user should know is appended to `notes`. Raises UserError and OSError.
    """
    remove_leftovers(folder)
    if resume == "never" and list_updates(folder):
        raise UserError(f"{folder} has checkpoints, and --resume is never. Give another --output-dir.")
    own = _newest_of_this_run(folder, notes)
    if resume == "must" and own is None:
        raise UserError(f"{folder} has no complete checkpoint, and --resume is must. Leave it out to begin a new run.")
    if resume in ("auto", "must", "never"):
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


def read_while_trained(run: Path, read: Callable[[], T]) -> T:
    """Return `read()`, which reads a checkpoint or weights of `run`, a run that may be training: if it fails, and what
    the run keeps has changed meanwhile, it is called again. Raises what `read` raises, a UserError or an OSError."""
    for _ in range(ATTEMPTS):
        before = _kept(run)
        try:
            return read()
        except (UserError, OSError):
            if _kept(run) == before:
                raise
    return read()


def _kept(run: Path) -> list[tuple[str, int, int]]:
    """The final weights and the checkpoints of a run, and what tells each from a later one of the same name."""
    kept = []
    checkpoints = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    for path in (
        run / "model.safetensors",
        *(checkpoint_path(checkpoints, each) for each in list_updates(checkpoints)),
    ):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            kept.append((path.name, status.st_ino, status.st_mtime_ns))
    return kept


def find_newest_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint in a run's directory (or in its folder of checkpoints), or None.

    One that an earlier owner wrote after a later one had begun does not count. Changes nothing on the disk. Raises
    OSError if the folder or a checkpoint cannot be read.
    """
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    for update in reversed(list_updates(folder)):
        path = checkpoint_path(folder, update)
        try:
            verify_checkpoint(path)
            if is_late(folder.parent, json_object(read_regular_file(path / "state.json")) or {}, update):
                continue
        except BrokenError:
            continue
        return path
    return None


def find_best_checkpoint(run: Path) -> Path:
    """Return the folder of the checkpoint with the run's best validation metric. It need not be there.

    Raises UserError if nothing has been the best yet, and OSError.
    """
    newest = find_newest_checkpoint(run)
    record: Any = read_result(run)
    if newest is not None:
        record = (json_object(read_regular_file(newest / "state.json")) or {}).get("train")
    update: Any = record.get("best_update") if isinstance(record, dict) else None
    if not is_count(update):
        raise UserError(
            f"--checkpoint best: {run} has no best checkpoint, because no validation split was evaluated before its "
            "newest checkpoint; leave it out for the newest weights."
        )
    return checkpoint_path(run / "checkpoints", update)


def find_weights(run: Path, checkpoint: Path | None = None) -> dict[str, Path]:
    """Return the files of a run's weights: "model", and "ema" if the run has an EMA.

    They come from `checkpoint`: its folder, only the folder's name, or "best". Without it, or with "last", they are the
    final weights, or else those of the newest complete checkpoint. A run that trains may delete it a moment later: see
    `read_while_trained`. Raises UserError if there are none, or if the checkpoint is incomplete or altered.
    """
    folder = run
    if checkpoint == Path("last"):
        checkpoint = None
    try:
        if checkpoint == Path("best"):
            checkpoint = find_best_checkpoint(run)
        if checkpoint is not None:
            inside = run / "checkpoints" / checkpoint
            folder = checkpoint if checkpoint.is_dir() or not inside.is_dir() else inside
            verify_checkpoint(folder)
        elif not (run / "model.safetensors").is_file():
            newest = find_newest_checkpoint(run)
            if newest is None:
                raise UserError(f"{run} has no weights yet: neither model.safetensors nor a complete checkpoint.")
            folder = newest
    except (BrokenError, OSError) as error:
        known = [checkpoint_path(Path(), update).name for update in list_updates(run / "checkpoints")]
        raise UserError(
            f"{folder} is not a complete checkpoint ({error}); {run} has {', '.join(known) or 'none'}."
        ) from error
    files = {name: folder / f"{name}.safetensors" for name in ("model", "ema")}
    return {name: file for name, file in files.items() if name == "model" or file.is_file()}


def _newest_of_this_run(folder: Path, notes: list[str]) -> tuple[Path, Snapshot] | None:
    """The newest complete checkpoint in `folder`; broken ones are renamed, which `notes` then says."""
    for update in reversed(list_updates(folder)):
        path = checkpoint_path(folder, update)
        try:
            snapshot = read_checkpoint(path)
            if is_late(folder.parent, snapshot.state, update):
                raise BrokenError(f"{path} was written by an earlier owner after a later one had begun")
            return path, snapshot
        except BrokenError as error:
            renamed = quarantine(path)
            notes.append(f"broken checkpoint: {error}; renamed to {renamed.name}, the previous one is used")
    return None


def _read_requested(path: Path) -> tuple[Path, Snapshot]:
    """The checkpoint that --resume names: `path` itself, or the newest complete one of the run in `path`."""

    def read() -> tuple[Path, Snapshot]:
        checkpoint = path if path.name.startswith("update-") else find_newest_checkpoint(path)
        if checkpoint is None:
            raise UserError(
                f"--resume {path}: there is no complete checkpoint. Give the path of a checkpoint or a run."
            )
        try:
            return checkpoint, read_checkpoint(checkpoint)
        except BrokenError as error:
            raise UserError(f"--resume {path}: {error}. Give another checkpoint.") from None

    return read_while_trained(path, read)


@dataclass(frozen=True)
class RunWeights:
    """The weights of a run, in host memory. The run may train, and delete the file at any moment."""

    file: Path
    """From which they were read."""
    tensors: dict[str, Tensor]
    sha256: str = ""
    """Of the file, if it was asked for."""

    @classmethod
    def read(cls, file: Path, *, hashed: bool = False) -> RunWeights:
        """Read a safetensors file. Raises UserError if it is missing or broken, and OSError."""
        try:
            require_regular_file(file, follow=True)
            tensors = load_file(file)
        except (OSError, ValueError, SafetensorError, RuntimeError, MemoryError) as error:
            # RuntimeError: torch's, if the file is deleted after safetensors has read its header, or too large
            raise UserError(f"The weights in {file} cannot be read: {reason_of(error, 200)}") from None
        return cls(file, tensors, sha256(file) if hashed else "")

    def load_into(self, model: nn.Module) -> None:
        """Load them into a model on any device, on each process independently: one that is not wrapped, or wrapped by
        DDP. Raises UserError if they belong to a different model."""
        targets = named_tensors(model)
        check_same_model(targets, self.tensors, self.file)
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(self.tensors[name])


def weights_of_run(run: Path, checkpoint: Path | None = None) -> dict[str, RunWeights]:
    """Read all weights of a run, which may train, with their SHA-256: "model", and "ema" if it has one; see
    `find_weights`. Raises UserError."""

    def read() -> dict[str, RunWeights]:
        found = find_weights(run, checkpoint)
        return {name: RunWeights.read(file, hashed=True) for name, file in found.items()}

    return _read(run, read)


def one_of_run(run: Path, checkpoint: Path | None = None, name: str | None = None) -> RunWeights:
    """Read the weights `name` of a run, which may train: "model" or "ema"; None: the EMA's if it has one. Raises
    UserError."""

    def read() -> RunWeights:
        files = find_weights(run, checkpoint)
        chosen = name or list(files)[-1]
        if chosen not in files:
            raise UserError(f"--weights {chosen}: {run} has no EMA; use --weights model.")
        return RunWeights.read(files[chosen])

    return _read(run, read)


def digest_of_run(run: Path, checkpoint: Path | None = None) -> str:
    """The SHA-256 of the file of a run's weights, the EMA's if it has one; see `find_weights`. Raises UserError."""

    def read() -> str:
        file = list(find_weights(run, checkpoint).values())[-1]
        try:
            require_regular_file(file, follow=True)
            with safe_open(file, framework="pt"):  # compares the size with the header: hashing 100 GB of zeros is slow
                pass
        except SafetensorError as error:
            raise UserError(f"The weights in {file} cannot be read: {error}") from None
        return sha256(file)

    return _read(run, read)


def _read(run: Path, read: Callable[[], T]) -> T:
    try:
        return read_while_trained(run, read)
    except OSError as error:
        raise UserError(f"The weights of {run} cannot be read: {error.strerror or error}.") from error


def check_same_model(targets: dict[str, Tensor], values: dict[str, Tensor], path: Path) -> None:
    """Raise UserError unless `values`, read from `path`, have the names, shapes and kinds of numbers of `targets`."""
    for name in sorted(targets.keys() | values.keys()):
        expected, actual = (str(tuple(t[name].shape)) if name in t else "missing" for t in (targets, values))
        if expected == actual and targets[name].dtype.is_floating_point != values[name].dtype.is_floating_point:
            expected, actual = (str(t[name].dtype).removeprefix("torch.") for t in (targets, values))
        if expected != actual:
            raise UserError(f"{path} is of another model: {name} is {actual} there and {expected} in this model.")
