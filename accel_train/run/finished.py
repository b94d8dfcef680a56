"""A start in the directory of a finished run: nothing is left to do, the run goes on to a later end, or it is refused.

result.json says that a run is finished. It is read before it is believed: one that is damaged does not end the run, and
one of other settings is not the result of what is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_train.checkpoint.directory import updates
from accel_train.config.compatibility import affects_learning, differences, is_under, not_allowed
from accel_train.config.options import parse
from accel_train.config.schema import Config, as_dict, value
from accel_train.errors import UserError
from accel_train.launch.environment import Launch
from accel_train.ownership.lease import Lease
from accel_train.run.relaunch import command_to_go_on

RESULT = "result.json"
WEIGHTS = ("model.safetensors", "ema.safetensors")
# With another of these the weights hardly ever fit.
OF_THE_MODEL = ("model", "data.name", "data.channels", "data.classes", "data.image-size")


@dataclass(frozen=True)
class Earlier:
    """The earlier end of a run that is started once more."""

    nothing_left: bool = False
    """The run has done all that it is asked for."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Before it goes on: files of the run's directory, and the names under which they are kept."""
    note: str = ""

    def set_aside(self, lease: Lease) -> None:
        """Rename the files of the earlier end in the run's directory. Raises UserError."""
        run = lease.directory
        lease.check(fresh=True)
        for name, kept in self.renamed.items():
            try:
                (run / name).rename(run / kept)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise UserError(f"{run / name} cannot be renamed to {kept}: {error.strerror}.") from None


def earlier_end(run: Path, config: Config, launch: Launch) -> Earlier | None:
    """How the run in the folder `run` ended; None if it is not finished. Changes nothing on the disk.

    Raises UserError if it is finished, but not as `config` asks, and `config` does not allow to go on from its end.
    """
    path = run / RESULT
    if not path.is_file():
        return None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); it should be the result of a finished run."
        ) from None
    checkpoints = run / "checkpoints"
    result = _read(content)
    if result is None:
        if not updates(checkpoints):
            raise UserError(
                f"{path} is damaged, and there are no checkpoints to make it anew from. Give another --output-dir, or "
                "delete the file to train from the start."
            )
        kept = f"{RESULT}.damaged"
        return Earlier(renamed={RESULT: kept}, note=f"{path} is damaged and renamed to {kept}; it is made anew")

    done, found = result["epochs"], differences(_settings(run, result), config)
    changed = [key for key in found if key == "epochs" or affects_learning(key, config.schedule.name)]
    if not changed:
        return Earlier(nothing_left=True)
    head = f"{run} holds a finished run of {done} epoch{'s' * (done > 1)}, which differs from what is asked for now: "
    head += "; ".join(f"{key}: {found[key]}" for key in changed)
    if config.epochs <= done:
        raise UserError(f"{head}. Give another --output-dir (or more epochs, to go on from its end).")
    if not updates(checkpoints):
        raise UserError(f"{head}. It cannot go on, for its checkpoints are gone: give another --output-dir.")
    refused = not_allowed(changed, config, config.allow_change)
    if "epochs" not in config.allow_change and "epochs" not in refused:
        refused.append("epochs")  # with every schedule: the end is replaced
    if not refused:
        renamed = {name: f"{Path(name).stem}-epoch-{done}{Path(name).suffix}" for name in (*WEIGHTS, RESULT)}
        note = f"goes on from the end of a run of {done} epochs: its result is kept as {renamed[RESULT]}"
        return Earlier(renamed=renamed, note=note)
    if any(is_under(key, OF_THE_MODEL) for key in refused):
        raise UserError(f"{head}. Give another --output-dir.")
    words = [word for key in found for word in _words(key, value(config, key))]
    command = command_to_go_on(launch, run, *words, "--allow-change", *config.allow_change, *refused)
    raise UserError(f"{head}. Give another --output-dir, or go on from its end, its result kept: {command}")


def _read(content: bytes) -> dict[str, Any] | None:
    """What result.json holds, or None if it is no result."""
    try:
        result = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(result, dict) or not isinstance(result.get("settings", {}), dict):
        return None
    kinds = {"recipe": str, "epochs": int, "updates": int}
    return result if all(isinstance(result.get(name), kind) for name, kind in kinds.items()) else None


def _settings(run: Path, result: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a result. Those of older versions have none: the run's config.yaml has them."""
    if "settings" in result:
        found: Mapping[str, Any] = result["settings"]
        return found
    path = run / "config.yaml"
    try:
        config = parse([str(path)])
    except UserError as error:
        raise UserError(
            f"{run / RESULT} does not say which settings it is of, and {path} cannot be used for it: {error} Give "
            "another --output-dir."
        ) from None
    if config.recipe != result["recipe"]:
        raise UserError(
            f"{run / RESULT} is of the recipe {result['recipe']!r}, {path} of {config.recipe!r}: it is not the result "
            "of this run. Rename the file to go on with the run, or give another --output-dir."
        )
    return as_dict(config) | {"epochs": result["epochs"]}


def _words(key: str, found: Any) -> list[str]:
    """The option `key` with the value `found`, as it is typed."""
    values = found if isinstance(found, tuple) else (found,)
    return [
        f"--{key}",
        *(str(each).lower() if each is None or isinstance(each, bool) else str(each) for each in values),
    ]
