"""What a checkpoint holds, and the files that it is written to and read from.

model.safetensors   parameters and buffers under the plain model's names
ema.safetensors     the same of the running mean of the weights, if there is one
optimizer.pt        the optimizer's state by parameter name; read with weights_only: it cannot run code
state.json          position and counts, seed, settings, versions, loss scaler, plateau schedule
manifest.json       size and SHA-256 of the others; see `commit`
"""

from __future__ import annotations

import json
import pickle
import platform
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from accel_train.checkpoint import directory as commit
from accel_train.checkpoint.directory import BrokenError
from accel_train.errors import UserError
from accel_train.files import set_default_permissions
from accel_train.untrusted import is_count, is_number, read_regular_file

PACKAGES = ("accel-train", "torch", "torchvision", "accelerate", "timm", "safetensors")
SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
FILES = ("state.json", "optimizer.pt", "model.safetensors", "ema.safetensors")


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment; tensors are whole and in host memory."""

    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    optimizer: dict[str, Any]
    state: dict[str, Any]


def write(folder: Path, snapshot: Snapshot) -> None:
    """Write the files of a checkpoint, but for the manifest, into `folder`."""
    for name, weights in (("model", snapshot.model), ("ema", snapshot.ema)):
        if weights is not None:
            # Each name has a tensor of its own here, so that tied weights are found under all their names.
            plain = {key: tensor.contiguous() for key, tensor in weights.items()}
            save_file(plain, folder / f"{name}.safetensors", metadata={"format": "pt"})
            set_default_permissions(folder / f"{name}.safetensors")
    torch.save(snapshot.optimizer, folder / "optimizer.pt")
    (folder / "state.json").write_text(json.dumps(snapshot.state, indent=1) + "\n")


def read(path: Path) -> Snapshot:
    """Verify and read a checkpoint, without running any code that may be in it.

    Raises BrokenError if a file is not as it was written; UserError if it is, but cannot be understood:
    that is no accident of the disk, and to pass over it in silence could lose work.
    """
    names = verify(path)
    file = path / "state.json"
    try:
        state = json.loads(read_regular_file(file))
        _check_records(state)
        file = path / "optimizer.pt"
        optimizer = _load_optimizer(file)
        file = path / "model.safetensors"
        model = load_file(file)
        file = path / "ema.safetensors"
        ema = load_file(file) if file.name in names else None
    except FileNotFoundError:  # it is being deleted by a run that goes on
        raise BrokenError(f"{file} is missing") from None
    except (
        ValueError, LookupError, TypeError, RuntimeError, EOFError, MemoryError, AttributeError, NotImplementedError,
        OverflowError, pickle.UnpicklingError, zipfile.BadZipFile, SafetensorError,
    ) as error:  # fmt: skip
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{file} is whole, but not a file of this program ({reason}). If you do not trust it, delete "
            f"{path}; the checkpoint before it is used then."
        ) from None
    return Snapshot(model, ema, optimizer, state)


def verify(path: Path) -> set[str]:
    """As `commit.verify`; UserError, too, if the manifest leaves out a file that is there or must be."""
    names = commit.verify(path)
    for name in FILES:
        if name not in names and (name != "ema.safetensors" or (path / name).exists()):
            raise UserError(
                f"{path / commit.MANIFEST} does not name {name}, so that nobody knows whether it is whole. If you do "
                f"not trust it, delete {path}; the checkpoint before it is used then."
            )
    return names


def _check_records(state: Any) -> None:
    """Raise ValueError unless state.json has what is read back from it; `train` is looked at by TrainState."""
    for name, kinds in (
        ("train", dict), ("configuration", dict), ("versions", dict), ("scaler", (dict, type(None))),
        ("schedule", (dict, type(None))),
    ):  # fmt: skip
        if not isinstance(state[name], kinds):
            raise ValueError(f"{name} is {state[name]!r}")
    for name in ("semantics", "pixels", "samples"):  # earlier checkpoints have none
        if name in state and not is_count(state[name]):
            raise ValueError(f"{name} is {state[name]!r}")
    if not isinstance(data := state["configuration"].get("data", {}), dict):
        raise ValueError(f"configuration.data is {data!r}")
    for name in ("scaler", "schedule"):
        for key, value in (state[name] or {}).items():
            if not (is_number(value) or (value is None and name == "schedule")):
                raise ValueError(f"{name}.{key} is {value!r}")
    scaler = state["scaler"]
    if scaler and not (scaler.keys() >= SCALER and scaler["scale"] > 0 and scaler["growth_factor"] > 1):
        raise ValueError(f"scaler is {scaler!r}")


def _load_optimizer(file: Path) -> Any:
    """torch.load of a file as `write` makes it. Others may unpack to any size, or be read beyond their end."""
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError("it is compressed")
    return torch.load(file, map_location="cpu", weights_only=True)


def read_weights(path: Path, *, ema: bool = False) -> dict[str, Tensor]:
    """The weights of a checkpoint, verified (`ema`: those of the running mean), or of any safetensors file.

    Raises UserError if they are not there or are broken.
    """
    file = path
    if path.is_dir():
        file = path / ("ema.safetensors" if ema else "model.safetensors")
        if ema and not file.exists():
            raise UserError(f"{path} has no running mean of the weights: the run was without --ema.enabled.")
    try:
        if path.is_dir():
            commit.verify(path, only=file.name)
        weights: dict[str, Tensor] = load_file(file)
    except (BrokenError, OSError, ValueError, SafetensorError) as error:
        raise UserError(f"The weights in {file} cannot be read: {error}") from None
    return weights


def check_fit(targets: dict[str, Tensor], values: dict[str, Tensor], path: Path) -> None:
    """Raise UserError unless the `values` of `path` have the names, shapes and kinds of numbers of a model's
    `targets`."""
    for name in sorted(targets.keys() | values.keys()):
        wanted, found = (str(tuple(t[name].shape)) if name in t else "missing" for t in (targets, values))
        if wanted == found and targets[name].dtype.is_floating_point != values[name].dtype.is_floating_point:
            wanted, found = (str(t[name].dtype).removeprefix("torch.") for t in (targets, values))
        if wanted != found:
            raise UserError(f"{path} is of another model: {name} is {found} there and {wanted} in this model.")


def versions(packages: Iterable[str] = PACKAGES, missing: str = "unknown") -> dict[str, str]:
    """The versions of Python and of what computes a run; `missing` for a package that is not installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = missing
    return found
