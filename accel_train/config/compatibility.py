"""Which changes of the configuration a resumed run may have, and what they are.

A key alters what is learned unless it stands here, so that a new key is refused until somebody has thought
about it:

| key | why it may change |
|---|---|
| micro-batch-size, data.workers | how an update is computed, not what it is; like the number of processes |
| data.placement | the same: where the pixels lie, not what they are |
| model.gradient-checkpointing | the same |
| data.root | the same data may lie elsewhere on the next machine |
| eval-batch-size, log-every-updates, trackers, checkpoint.* | only what is measured, shown or kept |
| data.skip-unreadable, data.max-pixels | what cannot be read ends a run otherwise; all others keep their places |
| share-gpus | where it is computed |
| on-nonfinite, …-timeout-seconds | what is done about a failure; whoever goes on after one may choose anew |
| eval-every-epochs | the same; but the plateau schedule follows the evaluations: not with that one |
| epochs | a run may go on for longer; but cosine and poly end at the last epoch: not with these |
| recipe, output-dir, resume, allow-change, take-over, config-only, traceback | of this start only; not noted |

All others alter what is learned: seed, batch-size, data.* (another limit of the test samples gives another
best), augment.*, model.* (`pretrained` also gives size, mean and standard deviation), optim.*, schedule.*,
loss.*, ema.*. Of these, what decides the samples of an epoch (OF_SAMPLES) can change between two epochs only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from accel_train.config.schema import Config, as_dict
from accel_train.errors import UserError, nearest

OF_THIS_START = ("recipe", "output-dir", "resume", "allow-change", "take-over", "config-only", "traceback")
NOTED = (
    "micro-batch-size", "data.workers", "data.placement", "model.gradient-checkpointing", "data.root",
    "eval-batch-size", "log-every-updates", "trackers", "checkpoint", "on-nonfinite", "rendezvous-timeout-seconds",
    "start-timeout-seconds", "hang-timeout-seconds", "share-gpus", "data.skip-unreadable", "data.max-pixels",
)  # fmt: skip
# What decides which samples an epoch has, and in which order: such a change waits for the epoch's end.
OF_SAMPLES = (
    "seed", "data.name", "data.val-fraction", "data.test-fraction", "data.train-limit", "data.train-images",
)  # fmt: skip
UNLESS_SCHEDULE = {"eval-every-epochs": ("plateau",), "epochs": ("cosine", "poly")}


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings (of `config.as_dict`) by the command line's keys, such as "optim.weight-decay"."""
    result: dict[str, Any] = {}
    for name, value in settings.items():
        key = prefix + name.replace("_", "-")
        result.update(flat(value, key + ".") if isinstance(value, Mapping) else {key: value})
    return result


def under(key: str, prefixes: Iterable[str]) -> bool:
    """Whether `key` is one of `prefixes` or lies in one: optim.lr in optim."""
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def alters(key: str, schedule: str) -> bool:
    """Whether a change of `key` alters what is learned, under the schedule of that name."""
    if key in UNLESS_SCHEDULE:
        return schedule in UNLESS_SCHEDULE[key]
    return not under(key, (*OF_THIS_START, *NOTED))


def learned(config: Config) -> dict[str, Any]:
    """All settings that alter what is learned, and the number of epochs, by the command line's keys."""
    settings = flat(as_dict(config)).items()
    return {key: value for key, value in settings if key == "epochs" or alters(key, config.schedule.name)}


def digest(config: Config) -> str:
    """SHA-256 of all settings that alter what is learned: runs that share it learn the same."""
    settings = {key: value for key, value in learned(config).items() if alters(key, config.schedule.name)}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def differences(saved: Mapping[str, Any], config: Config, samples: tuple[int, int] | None = None) -> dict[str, str]:
    """The settings in which `config` differs from the `saved` ones: key -> "old -> new".

    A key that `saved` does not have had its default value there: it came with a newer version of the program.
    `samples`: numbers of training samples then and now. If no setting explains that they differ, the data itself has
    changed, which is told under the key "data".
    """
    new, default = flat(as_dict(config)), flat(as_dict(Config()))
    old = {**default, **{key: value for key, value in flat(saved).items() if key in new}}
    found = {key: f"{old[key]} -> {new[key]}" for key in new if old[key] != new[key] and not under(key, OF_THIS_START)}
    explained = any(key in found for key in (*OF_SAMPLES, "data.skip-unreadable"))
    if samples is not None and samples[0] != samples[1] and not explained:
        found["data"] = f"{samples[0]} -> {samples[1]} training samples"
    return found


def not_allowed(found: Iterable[str], config: Config, allow: Iterable[str]) -> list[str]:
    """Those of the differing keys `found` that alter what is learned and are not under a name in `allow`.

    Raises UserError if `allow` has a name that is neither a key nor a group of keys.
    """
    known = flat(as_dict(config))
    allowed = [name.replace("_", "-") for name in allow]
    for name in allowed:
        if not any(under(key, [name]) for key in known):
            raise UserError(f"--allow-change: there is no key {name!r}.{nearest(name, known)}")
    return [key for key in found if alters(key, config.schedule.name) and not under(key, allowed)]


def compare(
    saved: Mapping[str, Any],
    config: Config,
    allow: Iterable[str] = (),
    *,
    samples: tuple[int, int] | None = None,
    obstacle: str | None = None,
) -> dict[str, str]:
    """The `differences` of `config` to a checkpoint's `saved` settings.

    `allow` names keys, or whole groups such as "optim", that may differ although they alter what is learned.
    Raises UserError if others do. `obstacle` says why the checkpoint cannot be used even if all changes are allowed:
    it is an error in any case, and then no --allow-change is proposed.
    """
    found = differences(saved, config, samples)
    refused = not_allowed(found, config, allow)
    if refused:
        listed = "; ".join(f"{key}: {found[key]}" for key in refused)
        advice = obstacle or (
            "Give the old ones, start a new run with another --output-dir, or allow it: "
            f"--allow-change {' '.join(refused)}"
        )
        raise UserError(f"The checkpoint was made with other settings: {listed}. {advice}")
    if obstacle:
        raise UserError(obstacle)
    return found
