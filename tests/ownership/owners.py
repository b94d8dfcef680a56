"""Claims of a run, forged owners, and what an owner writes."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_train.checkpoint.directory import commit
from accel_train.ownership.claim import Claim
from accel_train.ownership.owner import FILE, Lease, Owner
from accel_train.records.directory import RunDirectory


def not_stopped() -> str:
    return ""


def forge(run: Path, *, age: float = 0.0, **changes: Any) -> Owner:
    """Write the owner.json of a process on another host, whose heartbeat is `age` seconds old."""
    run.mkdir(parents=True, exist_ok=True)
    other = dataclasses.replace(Owner.of_this_process(), **({"host": "node9", "machine": "node9 boot"} | changes))
    (run / FILE).write_text(json.dumps(dataclasses.asdict(other)))
    os.utime(run / FILE, (time.time() - age,) * 2)
    return other


def claim(run: Path, *, take_over: bool = False, stopped: Callable[[], str] = not_stopped) -> Lease:
    attempts, began = Claim(run, stopped, take_over=take_over), time.monotonic()
    while (found := attempts.attempt()) is None:
        assert time.monotonic() - began < 20, "it waits for ever"
    return Lease(*found, renews=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def checkpoint_of(directory: RunDirectory, update: int) -> None:
    def write(folder: Path) -> None:
        (folder / "state.json").write_text(json.dumps({"generation": directory.lease.generation}))

    commit(directory.path / "checkpoints", update, write, check=directory.lease.check)


def weights_of(directory: RunDirectory) -> None:
    with directory.lease.replacing(directory.path / "model.safetensors") as temporary:
        temporary.write_text("late")
