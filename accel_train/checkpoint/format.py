"""The contents of a checkpoint, and how they are written to and read from its files.

model.safetensors   parameters and buffers under the names of the unwrapped model
ema.safetensors     the same of the EMA, if the run has one
optimizer.pt        the optimizer's state by parameter name; read with weights_only, so that it cannot run code
state.json          position and counts, seed, settings, versions, loss scaler, plateau or own schedule
manifest.json       size and SHA-256 of the others; see directory.py
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

from accel_train.checkpoint.directory import MANIFEST, BrokenError, verify_files
from accel_train.config.compatibility import check_format
from accel_train.errors import UserError
from accel_train.files import open_to_write, set_default_permissions
from accel_train.untrusted import (
    LARGEST,
    NotRegularFileError,
    is_count,
    is_number,
    open_to_read,
    parse_json,
    read_regular_file,
)

PACKAGES = ("accel-train", "torch", "torchvision", "accelerate", "timm", "safetensors")
SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
FILES = ("state.json", "optimizer.pt", "model.safetensors", "ema.safetensors")


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
    """Verify and read a checkpoint, without running any code that may be in it.

    Raises BrokenError if a file is not as it was written. Raises UserError if all files are as they were written, but
    cannot be understood: a disk error cannot cause that, and ignoring the checkpoint silently could lose work.
    """
    names = verify_checkpoint(path)
    file = path / "state.json"
    try:
        state = parse_json(read_regular_file(file))
        check_format(file, dict(state).get("format"), state["versions"]["accel-train"])
        _check_records(state)
        file = path / "optimizer.pt"
        optimizer = _load_optimizer(file)
        file = path / "model.safetensors"
        model = load_file(file)
        file = path / "ema.safetensors"
        ema = load_file(file) if file.name in names else None
    except FileNotFoundError:  # the run that owns the checkpoint is deleting it
        raise BrokenError(f"{file} is missing") from None
    except (
        ValueError, LookupError, TypeError, RuntimeError, EOFError, MemoryError, AttributeError, NotImplementedError,
        OverflowError, pickle.UnpicklingError, zipfile.BadZipFile, SafetensorError,
    ) as error:  # fmt: skip
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{file} matches its checksum, but it is not a file of this program ({reason}). If you do not trust it, "
            f"delete {path}; the previous checkpoint is used then."
        ) from None
    return Snapshot(model, ema, optimizer, state)


def verify_checkpoint(path: Path) -> set[str]:
    """Verify the files as `verify_files` does; UserError, too, if the manifest omits a file that exists or must exist.

    Returns the names of the files.
    """
    names = verify_files(path)
    for name in FILES:
        if name not in names and (name != "ema.safetensors" or (path / name).exists()):
            raise UserError(
                f"{path / MANIFEST} does not name {name}, so that file cannot be verified. If you do not trust it, "
                f"delete {path}; the previous checkpoint is used then."
            )
    return names


def _check_records(state: Any) -> None:
    """Raise ValueError unless state.json has the entries that are read from it. `TrainState` checks `train` itself."""
    for name, kinds in (
        ("train", dict), ("configuration", dict), ("versions", dict), ("scaler", (dict, type(None))),
        ("schedule", (dict, type(None))),
    ):  # fmt: skip
        if not isinstance(state[name], kinds):
            raise ValueError(f"{name} is {state[name]!r}")
    for name in ("samples", "generation"):
        if name in state and not is_count(state[name]):  # a loop of one's own does not say its samples
            raise ValueError(f"{name} is {state[name]!r}")
    if not isinstance(table := state.get("table", ""), str):
        raise ValueError(f"table is {table!r}")
    if not isinstance(bits := state.get("bits", {}), dict):
        raise ValueError(f"bits is {bits!r}")
    if not isinstance(data := state["configuration"].get("data", {}), dict):
        raise ValueError(f"configuration.data is {data!r}")
    for name in ("scaler", "schedule"):
        for key, value in (state[name] or {}).items():
            if (name, key) == ("schedule", "factors") and isinstance(value, str):
                continue  # a hash
            least = -LARGEST if (name, key) == ("schedule", "best") else 0.0  # a loss counts there with a minus
            if not (is_number(value, least) or (value is None and name == "schedule")):
                raise ValueError(f"{name}.{key} is {value!r}")
    scaler = state["scaler"]
    if scaler and not (scaler.keys() >= SCALER and scaler["scale"] > 0 and scaler["growth_factor"] > 1):
        raise ValueError(f"scaler is {scaler!r}")


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


def epochs_done(checkpoint: Path) -> int | None:
    """The number of epochs completed in a checkpoint; None if it is in the middle of an epoch, or broken."""
    try:
        train = parse_json(read_regular_file(checkpoint / "state.json"))["train"]
        return None if train["epoch_samples"] else int(train["epoch"])
    except (FileNotFoundError, NotRegularFileError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None
