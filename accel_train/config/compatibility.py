"""Which options may change when a run is resumed, how two configurations differ, and the number of runs.

An option affects what is learned unless its declaration says that it is `Free` (declaration.py): so a change of a new
option is refused. Weights may have another path: the file is compared by its SHA-256. The options that decide the
samples of an epoch (`DecidesSamples`) can change between two epochs only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accel_train import __version__
from accel_train.config.declaration import ONE_START, OWN_SCHEDULE, DecidesSamples, EndsRun, Free
from accel_train.config.schema import Config, as_dict, declared
from accel_train.errors import UserError, nearest
from accel_train.user_code import PREFIXES, metric_name, parse_reference, short_name

FORMAT = 11
"""The number of runs and checkpoints. It rises when one of another version would be misread, or would go on as another
run: when a file of a run has other contents, or when the same configuration and the same data lead to another trained
model. A run or a checkpoint with another number is refused."""
FREE = dict(declared(Free))
# The keys of the options that belong to one start, decide samples, and end a run.
START_KEYS = tuple(key for key, free in FREE.items() if free is ONE_START)
SAMPLE_KEYS = tuple(key for key, _ in declared(DecidesSamples))
END_KEYS = tuple(key for key, _ in declared(EndsRun))


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings (of `schema.as_dict`) by the command line's keys, such as "optim.weight-decay".

    A user's own file is named without its folder: on another machine it may be in another one, and its text is compared
    elsewhere (records/directory.py).
    """
    result: dict[str, Any] = {}
    for name, value in settings.items():
        key = prefix + name.replace("_", "-")
        if key in PREFIXES and isinstance(value, str):
            value = short_name(key, value)
        elif key == "metrics":
            value = [short_name(key, text) for text in value]
        elif key == "best-metric":  # with another function of that name the best would be something else
            own = [text for text in settings.get("metrics", ()) if ":" in text and metric_name(text) == value]
            value = short_name("metrics", own[0]) if own else value
        elif key in ("model.kwargs", "optim.kwargs") and value is not None:
            value = json.dumps(json.loads(value), sort_keys=True)
        result.update(flatten(value, key + ".") if isinstance(value, Mapping) else {key: value})
    return result


def check_format(file: Path, number: Any, version: Any) -> None:
    """Raise UserError unless `file`, of a run or a checkpoint, has this program's FORMAT.

    `number`, `version`: the format and the version of accel-train that the file names, None for neither.
    """
    if number != FORMAT:
        wrote = f"accel-train {str(version)[:40]}" if version else "an older accel-train"
        raise UserError(
            f"{file} was written by {wrote}, whose runs this one ({__version__}) does not read. Use that version, or "
            "train a new run with another --output-dir."
        )


def is_under(key: str, prefixes: Iterable[str]) -> bool:
    """Whether `key` is one of `prefixes` or belongs to one of these groups: optim.lr to optim."""
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def affects_learning(key: str, schedule: str) -> bool:
    """Whether a change of the option `key` changes what is learned, with the schedule of that name."""
    free = FREE.get(key)
    name = schedule if parse_reference("schedule.name", schedule) is None else OWN_SCHEDULE
    return free is None or name in free.unless


def settings_of_run(config: Config) -> dict[str, Any]:
    """Return the settings by the command line's keys, without those of a single start."""
    return {k: value for k, value in flatten(as_dict(config)).items() if not is_under(k, (*START_KEYS, "origin"))}


def learning_settings(config: Config) -> dict[str, Any]:
    """Return the settings that affect what is learned or when the run ends, by the command line's keys."""
    settings = flatten(as_dict(config)).items()
    return {key: value for key, value in settings if key in END_KEYS or affects_learning(key, config.schedule.name)}


def learning_fingerprint(config: Config) -> str:
    """Return the SHA-256 of the settings that affect what is learned: runs with the same one learn the same."""
    settings = {
        key: value for key, value in learning_settings(config).items() if affects_learning(key, config.schedule.name)
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def differences(
    saved: Mapping[str, Any],
    config: Config,
    samples: tuple[int, int] | None = None,
    tables: tuple[str, str] = ("", ""),
) -> dict[str, str]:
    """Return the settings in which `config` differs from the `saved` ones: key -> "old -> new".

    A key that `saved` does not contain is compared as its default value.
    `samples`: numbers of training samples then and now. If they differ and no setting explains it, the data itself has
    changed, and the result has the key "data". So it has if `tables`, the hashes of the table that lists the samples,
    then and now, differ ("": there was no table). With data.order=shards they are hashes of the shards.
    """
    new, default = flatten(as_dict(config)), flatten(as_dict(Config()))
    old = {**default, **{key: value for key, value in flatten(saved).items() if key in new}}
    changes = {
        key: f"{old[key]} -> {new[key]}" for key in new if old[key] != new[key] and not is_under(key, START_KEYS)
    }
    changes = _compare_by_content(changes, old, new)
    explained = any(key in changes for key in (*SAMPLE_KEYS, "data.skip-unreadable"))
    if samples is not None and samples[0] != samples[1] and not explained:
        changes["data"] = f"{samples[0]} -> {samples[1]} training samples"
    elif all(tables) and tables[0] != tables[1]:
        what, verb = ("table", "has") if config.data.order == "full" else ("shards", "have")
        changes["data"] = f"the {what} {verb} changed"
    return changes


def _compare_by_content(changes: dict[str, str], old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Return the changes between two flat configurations, in which weights are compared by content, not by path.

    What differs in the origin becomes a change of model.weights.
    """
    rest = {key: text for key, text in changes.items() if not key.startswith("origin.")}
    if any(key.startswith("origin.") and key != "origin.weights" for key in changes):
        before, after = (f"{flat['model.weights']} (sha256 {flat['origin.sha256'][:12]})" for flat in (old, new))
        rest.setdefault("model.weights", f"{before} -> {after}")
    elif new["origin.sha256"]:
        rest.pop("model.weights", None)
    return rest


def check_changes(
    changes: Mapping[str, str], config: Config, allow: Iterable[str] = (), obstacle: str | None = None
) -> None:
    """Raise UserError if `changes`, the `differences` of `config` from a checkpoint's settings, are not allowed.

    `allow` names options, or whole groups such as "optim", that may differ although they affect what is learned.
    `obstacle` says why the checkpoint cannot be used even if all changes are allowed: it is an error in any case, and
    the message then does not propose --allow-change. So is a name in `allow` that is neither an option nor a group.
    """
    known = flatten(as_dict(config))
    allowed = [name.replace("_", "-") for name in allow]
    for name in allowed:
        if not any(is_under(key, [name]) for key in known):
            raise UserError(f"--allow-change: there is no option {name!r}.{nearest(name, known)}")
    refused = [key for key in changes if affects_learning(key, config.schedule.name) and not is_under(key, allowed)]
    if refused:
        listed = "; ".join(f"{key}: {changes[key]}" for key in refused)
        advice = obstacle or (
            "Give the old settings, start a new run with another --output-dir, or allow the changes: "
            f"--allow-change {' '.join(refused)}"
        )
        raise UserError(f"The checkpoint was made with other settings: {listed}. {advice}")
    if obstacle:
        raise UserError(obstacle)
