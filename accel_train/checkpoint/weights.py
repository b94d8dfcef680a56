"""Weights alone: read from a checkpoint or a safetensors file, and loaded into a model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from accel_train.checkpoint.directory import BrokenError, verify_files
from accel_train.checkpoint.state_dict import named_tensors
from accel_train.errors import UserError


def load_weights(model: nn.Module, path: Path, *, ema: bool = False) -> None:
    """Load the weights of a checkpoint's directory, or of any safetensors file, into a model on any device.

    `ema`: those of the EMA. For a model that is not wrapped or wrapped by DDP, on each process independently. Raises
    UserError if the weights are missing or broken, or belong to a different model.
    """
    weights = read_weights(path, ema=ema)
    targets = named_tensors(model)
    check_same_model(targets, weights, path)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(weights[name])


def read_weights(path: Path, *, ema: bool = False) -> dict[str, Tensor]:
    """The verified weights of a checkpoint (`ema`: those of the EMA), or the weights in any safetensors file.

    Raises UserError if they are missing or broken.
    """
    file = path
    if path.is_dir():
        file = path / ("ema.safetensors" if ema else "model.safetensors")
        if ema and not file.exists():
            raise UserError(f"{path} has no EMA weights: the run was started without --ema.enabled.")
    try:
        if path.is_dir():
            verify_files(path, only=file.name)
        weights: dict[str, Tensor] = load_file(file)
    except (BrokenError, OSError, ValueError, SafetensorError) as error:
        raise UserError(f"The weights in {file} cannot be read: {error}") from None
    return weights


def check_same_model(targets: dict[str, Tensor], values: dict[str, Tensor], path: Path) -> None:
    """Raise UserError unless `values`, read from `path`, have the names, shapes and kinds of numbers of `targets`."""
    for name in sorted(targets.keys() | values.keys()):
        expected, actual = (str(tuple(t[name].shape)) if name in t else "missing" for t in (targets, values))
        if expected == actual and targets[name].dtype.is_floating_point != values[name].dtype.is_floating_point:
            expected, actual = (str(t[name].dtype).removeprefix("torch.") for t in (targets, values))
        if expected != actual:
            raise UserError(f"{path} is of another model: {name} is {actual} there and {expected} in this model.")
