"""A start in the directory of a finished run: either nothing is left to do, the run is extended, or it is refused.

result.json says that a run is finished. Its content is checked: a damaged result does not finish the run, and the
result of other settings is not the result that is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_train.checkpoint.directory import list_updates
from accel_train.config.compatibility import (
    END_KEYS,
    affects_learning,
    check_format,
    differences,
    is_under,
    not_allowed,
)
from accel_train.config.schema import Config, value
from accel_train.errors import UserError, counted
from accel_train.launch.environment import Launch
from accel_train.ownership.lease import Lease
from accel_train.ownership.owner import is_late
from accel_train.records.result import resume_command
from accel_train.untrusted import json_object, read_regular_file

RESULT = "result.json"
WEIGHTS = ("model.safetensors", "ema.safetensors")
# If one of these changes, the weights hardly ever fit.
MODEL_KEYS = ("model", "data.name", "data.channels")


@dataclass(frozen=True)
class FinishedRun:
    """A finished run whose directory is used for a new start."""

    result: Mapping[str, Any] = field(default_factory=dict)
    """The content of result.json, if the run has already done everything that is asked for."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Files of the run's directory, and the names under which they are kept when the run goes on."""
    note: str = ""
    """For the user, when the run goes on."""

    def rename_results(self, lease: Lease) -> None:
        """Rename the results of the finished run in its directory. Raises UserError."""
        run = lease.directory
        for name, kept in self.renamed.items():
            lease.check()
            try:
                (run / name).rename(run / kept)
                if not lease.holds():  # stopped after the check: what was renamed is another start's
                    (run / kept).rename(run / name)
                    lease.check()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise UserError(
                    f"{run / name} cannot be renamed to {kept}: {error.strerror}. Rename it yourself."
                ) from None


def find_finished_run(run: Path, config: Config, launch: Launch) -> FinishedRun | None:
    """The finished run in the folder `run`; None if there is none. Changes nothing on the disk.

    A result that an earlier owner wrote after a later one had begun to train does not finish the run.

    Raises UserError if its settings differ from `config`, and `config` does not allow it to go on from its end.
    """
    path = run / RESULT
    if not path.is_file():
        return None
    try:
        content = read_regular_file(path, follow=True)
    except OSError as error:
        raise UserError(
            f"{path}, the result of a finished run, cannot be read ({error.strerror}). Give another --output-dir."
        ) from None
    checkpoints = run / "checkpoints"
    result = _read(path, content)
    if result is not None and is_late(run, result):
        return None
    if result is None:
        if not list_updates(checkpoints):
            raise UserError(
                f"{path} is damaged, and there are no checkpoints from which to recreate it. Give another "
                "--output-dir, or delete the file to train from the start."
            )
        kept = f"{RESULT}.damaged"
        return FinishedRun(renamed={RESULT: kept}, note=f"{path} is damaged and renamed to {kept}; it is created again")

    done, changes = result["epochs"], differences(result["settings"], config)
    changed = [key for key in changes if key in END_KEYS or affects_learning(key, config.schedule.name)]
    if not changed:
        return FinishedRun(result)
    head = f"{run} holds a finished run of {counted(done, 'epoch')}, which differs from this start's settings: "
    head += "; ".join(f"{key}: {changes[key]}" for key in changed)
    if longer := _too_short(result, config):
        raise UserError(f"{head}. Give another --output-dir (or {longer}, to go on from its end).")
    if not list_updates(checkpoints):
        raise UserError(f"{head}. It cannot go on, because its checkpoints are gone. Give another --output-dir.")
    refused = not_allowed(changed, config, config.allow_change)
    # What lets it go on needs to be allowed with every schedule, because the result is replaced.
    allowed = [name.replace("_", "-") for name in config.allow_change]
    refused += [key for key in changed if key in END_KEYS and not is_under(key, allowed) and key not in refused]
    if not refused:
        renamed = {name: f"{Path(name).stem}-epoch-{done}{Path(name).suffix}" for name in (*WEIGHTS, RESULT)}
        note = f"goes on from the end of a run of {counted(done, 'epoch')}: its result is kept as {renamed[RESULT]}"
        return FinishedRun(renamed=renamed, note=note)
    if any(is_under(key, MODEL_KEYS) for key in refused):
        raise UserError(f"{head}. Give another --output-dir.")
    words = [word for key in changes for word in _words(key, value(config, key))]
    command = resume_command(launch, run, *words, "--allow-change", *config.allow_change, *refused)
    raise UserError(f"{head}. Give another --output-dir, or go on from its end (its result is kept): {command}")


def _too_short(result: Mapping[str, Any], config: Config) -> str:
    """What must be larger for a run with this result to go on, in words; "" if it goes on with `config`."""
    if config.epochs <= result["epochs"]:
        return "more epochs"
    options = {"updates": "stop.updates", "patience": "stop.patience-epochs", "hours": "stop.hours"}
    by = options.get(str(result.get("stopped_by")))
    if by is None:
        return ""
    before, now = result["settings"].get(by), value(config, by)
    larger = now is None or not isinstance(before, (int, float)) or now > before
    return "" if larger else f"--{by} of more than {before}, or none"


def _read(path: Path, content: bytes) -> dict[str, Any] | None:
    """The content of result.json, or None if it is not a result. Raises UserError for one of another version."""
    result = json_object(content)
    kinds: dict[str, Any] = {"recipe": str, "epochs": (int, float), "updates": int}
    if result is None or not all(isinstance(result.get(name), kind) for name, kind in kinds.items()):
        return None
    check_format(path, result.get("format"), result.get("version"))
    return result if isinstance(result.get("settings"), dict) else None


def _words(key: str, setting: Any) -> list[str]:
    """The option `key` with the value `setting`, as it is typed."""
    values = setting if isinstance(setting, tuple) else (setting,)
    return [
        f"--{key}",
        *(str(item).lower() if item is None or isinstance(item, bool) else str(item) for item in values),
    ]
