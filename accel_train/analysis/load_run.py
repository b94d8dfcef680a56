"""The model that a run has trained: its weights found, and loaded into a model made anew."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from accel_train import models
from accel_train.checkpoint.directory import BrokenError, directory, updates
from accel_train.checkpoint.format import verify
from accel_train.checkpoint.manager import find, load_weights
from accel_train.config.schema import Model
from accel_train.errors import UserError
from accel_train.records.model_info import ModelInfo


def find_weights(run: Path, checkpoint: Path | None = None) -> dict[str, Path]:
    """The files of a run's weights: "model", and "ema" if the run keeps a running mean of them.

    They are of the `checkpoint` (its folder, whose name alone will do), else the final ones, else of the newest whole
    checkpoint. Raises UserError if there are none, or if the checkpoint is torn or altered.
    """
    folder = run
    try:
        if checkpoint is not None:
            inside = run / "checkpoints" / checkpoint
            folder = checkpoint if checkpoint.is_dir() or not inside.is_dir() else inside
            verify(folder)
        elif not (run / "model.safetensors").is_file():
            found = find(run)
            if found is None:
                raise UserError(f"{run} has no weights yet: neither model.safetensors nor a whole checkpoint.")
            folder = found
    except (BrokenError, OSError) as error:
        known = [directory(Path(), update).name for update in updates(run / "checkpoints")]
        raise UserError(
            f"{folder} is no whole checkpoint ({error}); {run} has {', '.join(known) or 'none'}."
        ) from error
    files = {name: folder / f"{name}.safetensors" for name in ("model", "ema")}
    return {name: file for name, file in files.items() if name == "model" or file.is_file()}


def load_model(model: Model, info: ModelInfo, weights: Path) -> nn.Module:
    """The model of a run with the weights in the file `weights`, on the CPU, in evaluation mode.

    Raises UserError if they cannot be read or are another model's.
    """
    made = models.create_model(
        model,
        num_classes=len(info.classes),
        channels=info.channels,
        image_size=info.image_size,
        published=False,
    )
    load_weights(made, weights)
    return made.eval()
