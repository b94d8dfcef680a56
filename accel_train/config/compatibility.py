"""Which options may change when a run is resumed, and how two configurations differ.

An option affects what is learned unless this table lists it. So a change of a new option is refused until somebody adds
it to the table:

| key | why it may change |
|---|---|
| micro-batch-size, data.workers | how an update is computed, not its result; like the number of processes |
| data.placement | where the pixels are kept, not their values |
| model.gradient-checkpointing | how gradients are computed, not their values |
| data.root | the next machine may keep the same data in another folder |
| eval-batch-size, log-every-updates, trackers, checkpoint.* | only what is measured, shown or kept |
| data.skip-unreadable, data.max-pixels | they leave out images that end a run otherwise; all others keep their index |
| share-gpus | where the run is computed |
| cuda-graph | how kernels are started, not what they compute (learning rates are rounded to float32) |
| on-nonfinite, …-timeout-seconds | what to do about a failure; after one, the user may choose anew |
| eval-every-epochs | only what is measured; refused for the plateau schedule, which follows the evaluations |
| epochs | a run may become longer; refused for cosine and poly, which end at the last epoch |
| stop.* | a run may end earlier or later |
| model.weights | another path with the same content: the file is compared by its SHA-256 |
| recipe, output-dir, resume, allow-change, take-over, config-only, traceback | they belong to one start; not compared |

All others affect what is learned: seed, batch-size, data.* (another limit of the test samples gives another best
checkpoint), augment.*, model.* (`pretrained` also sets size, mean and standard deviation), optim.*, schedule.*, loss.*,
ema.*. Of these, the options that decide the samples of an epoch (SAMPLE_KEYS) can change between two epochs only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from accel_train.config.option_types import REMOVED
from accel_train.config.origin import compare_by_content
from accel_train.config.schema import Config, as_dict
from accel_train.errors import UserError, nearest
from accel_train.user_code.reference import PREFIXES, short_name

START_KEYS = ("recipe", "output-dir", "resume", "allow-change", "take-over", "config-only", "traceback")
FREE_KEYS = (
    "micro-batch-size", "data.workers", "data.placement", "model.gradient-checkpointing", "data.root",
    "eval-batch-size", "log-every-updates", "trackers", "checkpoint", "on-nonfinite", "rendezvous-timeout-seconds",
    "start-timeout-seconds", "hang-timeout-seconds", "share-gpus", "cuda-graph", "data.skip-unreadable",
    "data.max-pixels", "stop",
)  # fmt: skip
# These decide which samples an epoch has, and in which order: such a change is possible only at the end of an epoch.
SAMPLE_KEYS = (
    "seed", "data.name", "data.val-fraction", "data.test-fraction", "data.train-limit", "data.train-images",
    "data.sampler",
)  # fmt: skip
# These decide where a run ends. They are part of its result, which needs --allow-change to be replaced by a later one.
END_KEYS = ("epochs", "stop.patience-epochs", "stop.hours")
FREE_UNLESS_SCHEDULE = {"eval-every-epochs": ("plateau",), "epochs": ("cosine", "poly")}


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings (of `schema.as_dict`) by the command line's keys, such as "optim.weight-decay".

    A user's own file is named without its folder: on another machine it may be in another one, and its text is compared
    elsewhere (records/code.py).
    """
    result: dict[str, Any] = {}
    for name, value in settings.items():
        key = prefix + name.replace("_", "-")
        if key in PREFIXES and isinstance(value, str):
            value = short_name(key, value)
        elif key == "model.kwargs" and value is not None:
            value = json.dumps(json.loads(value), sort_keys=True)
        result.update(flatten(value, key + ".") if isinstance(value, Mapping) else {key: value})
    return result


def is_under(key: str, prefixes: Iterable[str]) -> bool:
    """Whether `key` is one of `prefixes` or belongs to one of these groups: optim.lr to optim."""
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def affects_learning(key: str, schedule: str) -> bool:
    """Whether a change of the option `key` changes what is learned, with the schedule of that name."""
    if key in FREE_UNLESS_SCHEDULE:
        return schedule in FREE_UNLESS_SCHEDULE[key]
    return not is_under(key, (*START_KEYS, *FREE_KEYS))


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

    A key that `saved` does not contain is compared as its default value: an older version of the program saved it. An
    option that no longer exists is a difference unless it had the value that is left.
    `samples`: numbers of training samples then and now. If they differ and no setting explains it, the data itself has
    changed, and the result has the key "data". So it has if `tables`, the hashes of the table that lists the samples,
    then and now, differ ("": there was no table).
    """
    new, default = flatten(as_dict(config)), flatten(as_dict(Config()))
    old = {**default, **{key: value for key, value in flatten(saved).items() if key in new}}
    changes = {
        key: f"{old[key]} -> {new[key]}" for key in new if old[key] != new[key] and not is_under(key, START_KEYS)
    }
    changes = compare_by_content(changes, old, new)
    removed = {key: flatten(saved).get(key, left) for key, (left, _) in REMOVED.items()}
    changes |= {key: f"{old} -> removed" for key, old in removed.items() if old != REMOVED[key][0]}
    explained = any(key in changes for key in (*SAMPLE_KEYS, "data.skip-unreadable"))
    if samples is not None and samples[0] != samples[1] and not explained:
        changes["data"] = f"{samples[0]} -> {samples[1]} training samples"
    elif all(tables) and tables[0] != tables[1]:
        changes["data"] = "the table has changed"
    return changes


def not_allowed(changes: Iterable[str], config: Config, allow: Iterable[str]) -> list[str]:
    """Return the keys of `changes` that affect what is learned and that no name in `allow` covers.

    Raises UserError if `allow` contains a name that is neither an option nor a group of options.
    """
    known = [*flatten(as_dict(config)), *REMOVED]
    allowed = [name.replace("_", "-") for name in allow]
    for name in allowed:
        if not any(is_under(key, [name]) for key in known):
            raise UserError(f"--allow-change: there is no option {name!r}.{nearest(name, known)}")
    return [key for key in changes if affects_learning(key, config.schedule.name) and not is_under(key, allowed)]


def check_changes(
    saved: Mapping[str, Any],
    config: Config,
    allow: Iterable[str] = (),
    *,
    samples: tuple[int, int] | None = None,
    tables: tuple[str, str] = ("", ""),
    obstacle: str | None = None,
) -> dict[str, str]:
    """Return the `differences` between a checkpoint's `saved` settings and `config`.

    `allow` names options, or whole groups such as "optim", that may differ although they affect what is learned.
    Raises UserError if others differ. `obstacle` says why the checkpoint cannot be used even if all changes are
    allowed: it is an error in any case, and the message then does not propose --allow-change.
    """
    changes = differences(saved, config, samples, tables)
    refused = not_allowed(changes, config, allow)
    if refused:
        listed = "; ".join(f"{key}: {changes[key]}" for key in refused)
        advice = obstacle or (
            "Give the old settings, start a new run with another --output-dir, or allow the changes: "
            f"--allow-change {' '.join(refused)}"
        )
        raise UserError(f"The checkpoint was made with other settings: {listed}. {advice}")
    if obstacle:
        raise UserError(obstacle)
    return changes
