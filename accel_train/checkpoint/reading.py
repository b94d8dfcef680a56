"""The weights of a run, which may be training: its final ones, or those of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from accel_train.checkpoint.directory import (
    BrokenError,
    checkpoint_path,
    find_newest_checkpoint,
    list_updates,
    read_while_trained,
    verify_checkpoint,
)
from accel_train.checkpoint.state import check_same_model, named_tensors
from accel_train.errors import UserError, reason_of
from accel_train.files import is_count, json_object, read_regular_file, require_regular_file
from accel_train.ownership.owner import read_result


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


@dataclass(frozen=True)
class RunWeights:
    """The weights of a run, in host memory. The run may train, and delete the file at any moment."""

    file: Path
    """From which they were read."""
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, file: Path) -> RunWeights:
        """Read a safetensors file. Raises UserError if it is missing or broken."""
        try:
            require_regular_file(file, follow=True)
            return cls(file, load_file(file))
        except (OSError, ValueError, SafetensorError, RuntimeError, MemoryError) as error:
            # RuntimeError: torch's, if the file is deleted after safetensors has read its header, or too large
            raise UserError(f"The weights in {file} cannot be read: {reason_of(error, 200)}") from None

    def load_into(self, model: nn.Module) -> None:
        """Load them into a model on any device, on each process independently: one that is not wrapped, or wrapped by
        DDP. Raises UserError if they belong to a different model."""
        targets = named_tensors(model)
        check_same_model(targets, self.tensors, self.file)
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(self.tensors[name])


def weights_of_run(run: Path, checkpoint: Path | None = None) -> dict[str, RunWeights]:
    """Read all weights of a run, which may train: "model", and "ema" if it has one; see `find_weights`. Raises
    UserError."""

    def read() -> dict[str, RunWeights]:
        found = find_weights(run, checkpoint)
        return {name: RunWeights.read(file) for name, file in found.items()}

    return read_while_trained(read)


def one_of_run(run: Path, checkpoint: Path | None = None, name: str | None = None) -> RunWeights:
    """Read the weights `name` of a run, which may train: "model" or "ema"; None: the EMA's if it has one. Raises
    UserError."""

    def read() -> RunWeights:
        files = find_weights(run, checkpoint)
        chosen = name or list(files)[-1]
        if chosen not in files:
            raise UserError(f"--weights {chosen}: {run} has no EMA; use --weights model.")
        return RunWeights.read(files[chosen])

    return read_while_trained(read)
