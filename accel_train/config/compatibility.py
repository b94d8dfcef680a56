"""Which options may change when a run is resumed, how two configurations differ, and what older versions did.

An option affects what is learned unless its declaration says that it is `Free` (declaration.py): so a change of a new
option is refused. Weights may have another path: the file is compared by its SHA-256. The options that decide the
samples of an epoch (`DecidesSamples`) can change between two epochs only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from accel_train.config.declaration import ONE_START, DecidesSamples, EndsRun, Free
from accel_train.config.option_types import REMOVED, declared
from accel_train.config.origin import compare_by_content
from accel_train.config.schema import Config, as_dict
from accel_train.errors import UserError, nearest
from accel_train.user_code.reference import PREFIXES, metric_name, short_name

FREE = dict(declared(Free))
# The keys of the options that belong to one start, decide samples, and end a run.
START_KEYS = tuple(key for key, free in FREE.items() if free is ONE_START)
SAMPLE_KEYS = tuple(key for key, _ in declared(DecidesSamples))
END_KEYS = tuple(key for key, _ in declared(EndsRun))


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings (of `schema.as_dict`) by the command line's keys, such as "optim.weight-decay".

    A user's own file is named without its folder: on another machine it may be in another one, and its text is compared
    elsewhere (records/provenance.py).
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


def is_under(key: str, prefixes: Iterable[str]) -> bool:
    """Whether `key` is one of `prefixes` or belongs to one of these groups: optim.lr to optim."""
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def affects_learning(key: str, schedule: str) -> bool:
    """Whether a change of the option `key` changes what is learned, with the schedule of that name."""
    free = FREE.get(key)
    return free is None or schedule in free.unless


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
    then and now, differ ("": there was no table). With data.order=shards they are hashes of the shards.
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
        what, verb = ("table", "has") if config.data.order == "full" else ("shards", "have")
        changes["data"] = f"the {what} {verb} changed"
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
    changes: Mapping[str, str], config: Config, allow: Iterable[str] = (), obstacle: str | None = None
) -> None:
    """Raise UserError if `changes`, the `differences` of `config` from a checkpoint's settings, are not allowed.

    `allow` names options, or whole groups such as "optim", that may differ although they affect what is learned.
    `obstacle` says why the checkpoint cannot be used even if all changes are allowed: it is an error in any case, and
    the message then does not propose --allow-change.
    """
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


SEMANTICS = 7
"""It rises when the same configuration and the same data would lead to another trained model.

1   The first version; checkpoints, caches and model.json without a number have this one.
2   Images are rotated as their EXIF orientation says. The box of crop=resized is cut exactly from a JPEG decoded at a
    reduced size; before, it was rounded to that size's pixels. Data is divided into splits before
    --data.skip-unreadable leaves images out, and the training images keep their indices; before, the following images
    moved up, some of them into other splits.
3   BatchNorm normalises virtual batches, not the micro-batch of a process, and its running statistics are updated once
    an update, not once a micro-batch. Masks of dropout and drop path are functions of (seed, update, sample, layer).
4   Each call of a BatchNorm that a forward pass calls several times counts in its running statistics; before, only the
    last one did. An update without a call leaves them as they are; before, it moved them to 0. Values that are not as
    many for each sample, such as learned prototypes, count once an update; before, once a forward pass of a process.
5   Folders and tar files have more kinds of images: .jfif, .gif, .avif, .jp2 and others were left out before.
6   RandAugment, TrivialAugment and AutoAugment turn and shift PIL images with --augment.interpolation; before, tensors,
    to the nearest pixel. --optim.decay-all also decays what a model of timm's excludes, such as position embeddings.
    (A checkpoint has the weight decay of each of its groups, so an older run keeps its own.)
7   --schedule.name plateau does not count the evaluations of its warm-up. (A checkpoint says whether it does.)

A run continues only with the semantics that it began with: an older run that a change affects is refused (but not of
number 3 for 4: no release has written 3). No change has affected the pixels of datasets in memory (digits, MNIST, …).
"""
# The latest numbers that changed these datasets: see Splits.semantics.
IN_MEMORY, IMAGE_FILES, IMAGE_NAMES = 1, 2, 5  # the last one: image files that older versions left out


def check_same_pixels(what: str, before: int, now: int) -> None:
    """Raise UserError if the images of the checkpoint `what`, with the number `before`, have other pixels now."""
    before, now = min(before, IMAGE_FILES), min(now, IMAGE_FILES)
    if before < now:
        raise UserError(
            f"{what} is from an older accel-train, which ignored the EXIF orientation of image files and cropped them "
            "differently. Finish the run with the version in state.json, or start a new run with another --output-dir."
        )
    if before > now:
        raise UserError(
            f"{what} is from a run whose images were rotated as EXIF says, but the cache was written by an older "
            "accel-train, which ignored EXIF. Write the cache again with `accel-train cache-data`."
        )


def check_same_images(what: str, before: int, images: int) -> None:
    """Raise UserError if `what`, of a run with the number `before`, left out some of these `images` by their names.

    `images`: `Splits.semantics`.
    """
    if before < IMAGE_NAMES <= images:
        raise UserError(
            f"{what} is from an older accel-train, which left out images with such names as .jfif, .gif or .avif, and "
            "the data has some. Move them out of the data's folder, or start a new run with another --output-dir."
        )


def with_older_batchnorm(saved: dict[str, Any], before: int) -> dict[str, Any]:
    """Return `saved`, the settings of a run with the number `before` whose model has BatchNorm.

    For an older run the virtual batch size becomes "each process's micro-batch", as it was then. So resuming the run,
    which changes its BatchNorm statistics, requires --allow-change virtual-batch-size.
    """
    return {**saved, "virtual_batch_size": "each process's micro-batch"} if before < 3 else saved


def check_same_policy(what: str, before: int, policy: str) -> None:
    """Raise UserError if `what`, of a run with the number `before`, had other images with this augment.policy."""
    if before < 6 and policy not in ("none", "augmix"):
        raise UserError(
            f"{what} is from an older accel-train, where --augment.policy {policy} did not use "
            "--augment.interpolation. Finish the run with the version in state.json, or start a new run with another "
            "--output-dir."
        )


def check_same_splits(what: str, before: int, data: Mapping[str, Any]) -> None:
    """Raise UserError if `what`, of a run with the number `before` and the settings `data`, had other splits."""
    if before > SEMANTICS:
        raise UserError(
            f"{what} is from a newer accel-train, where the same configuration has another meaning. Use that version."
        )
    if before < 2 and data.get("skip_unreadable") is not None:
        raise UserError(
            f"{what} is from an older accel-train, which left out the images of --data.skip-unreadable before it "
            "divided the data, so its splits were different. Use that version for this run, or start a new run with "
            "another --output-dir."
        )
