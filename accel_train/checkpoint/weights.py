"""Weights alone: read from a checkpoint or a safetensors file, and loaded into a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from accel_train.checkpoint.choose import find_weights, read_while_trained
from accel_train.checkpoint.state_dict import named_tensors
from accel_train.errors import UserError, reason_of
from accel_train.files import sha256
from accel_train.untrusted import require_regular_file

T = TypeVar("T")


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
