"""What is wrong with values of the right types: out of bounds, contradictory, unread, or unfit for the data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from accel_train.config.declaration import BEST_METRICS, FALLING, TAKEN_NAMES, Bound, Needs
from accel_train.config.recipe import Option
from accel_train.config.schema import Augment, Config, Data, Model, declared, option_types, value
from accel_train.config.url import check_protocol, is_url
from accel_train.errors import UserError
from accel_train.user_code import metric_name, parse_reference


def out_of_bounds(config: Any) -> dict[str, str]:
    """Return the options whose values are out of bounds: key -> the expected value, in words.

    `config`: a `Config`, or the options of a command.
    """
    mistakes: dict[str, str] = {}
    for key, bound in declared(Bound, type(config)):
        setting = value(config, key)
        if setting is not None and not bound.is_within(setting):
            mistakes[key] = bound.expected
    for key in option_types(type(config)):  # type: ignore[arg-type]
        setting = value(config, key)
        numbers = setting if isinstance(setting, tuple) else (setting,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            mistakes.setdefault(key, "a finite number")
    return mistakes


def contradictions(config: Config) -> dict[str, str]:
    """Return the options whose values do not fit those of other options: key -> the expected value, in words.

    Each value must be within its own bounds. `configs` in tests/config/test_options.py must avoid each of them.
    """
    mistakes: dict[str, str] = {}
    if config.data.val_fraction + config.data.test_fraction >= 1:
        mistakes["data.val-fraction"] = "data.val-fraction + data.test-fraction below 1"
    if config.virtual_batch_size is not None:
        mistakes |= _contradictions_of_virtual_batch(config, config.virtual_batch_size)
    if config.schedule.name == "multistep" and not config.schedule.milestones:
        mistakes["schedule.milestones"] = "at least one epoch for schedule.name=multistep"
    mistakes |= _contradictions_of_model(config.model)
    if config.augment.crop_fraction is not None and config.augment.resize is not None:
        mistakes["augment.crop-fraction"] = "none with augment.resize: both say how evaluation images are resized"
    if config.optim.head_lr is not None and not config.optim.lr:
        mistakes["optim.head-lr"] = "none with optim.lr=0, to which it would be in proportion (model.freeze-body?)"
    if config.data.sampler == "balanced" and config.data.order == "shards":
        mistakes["data.sampler"] = "shuffle with data.order=shards, or give loss.class-weights=balanced"
    if config.data.sampler == "balanced" and config.loss.class_weights == "balanced":
        mistakes["loss.class-weights"] = "none with data.sampler=balanced: both together correct the imbalance twice"
    if config.loss.name != "binary_cross_entropy" and config.loss.bce_target_threshold is not None:
        mistakes["loss.bce-target-threshold"] = "its default unless loss.name=bce, whose option it is"
    if config.loss.label_smoothing and parse_reference("loss.name", config.loss.name) is not None:
        mistakes["loss.label-smoothing"] = "0 with a loss of your own, which smooths the targets itself"
    names = [metric_name(text) for text in config.metrics]
    if taken := [name for name in names if name in TAKEN_NAMES or name.startswith("class_")]:
        mistakes["metrics"] = f"names that no built-in metric has (rename {', '.join(taken)})"
    elif twice := {name for name in names if names.count(name) > 1}:
        mistakes["metrics"] = f"each name once (rename {', '.join(sorted(twice))})"
    if config.best_metric not in (None, *BEST_METRICS, *names):
        others = f" or {', '.join(names)} of --metrics" if names else " (others: name them with --metrics, too)"
        mistakes["best-metric"] = f"one of {', '.join(BEST_METRICS)}{others}"
    mistakes |= _contradictions_of_schedule(config)
    return mistakes


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in increasing order. Takes 0.1 s for numbers as large as 10**12."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _contradictions_of_virtual_batch(config: Config, size: int) -> dict[str, str]:
    mixes = config.augment.mixes
    possible = [n for n in divisors(config.batch_size) if not (mixes and n % 2)]
    if not possible or size in possible:
        return {}
    near = sorted(sorted(possible, key=lambda n: abs(math.log(n / size)))[:2])
    pairs = " that is even, as mixup and cutmix need" * mixes
    expected = f"a divisor of the batch size {config.batch_size}{pairs}, such as {' or '.join(map(str, near))}"
    return {"virtual-batch-size": expected}


def _contradictions_of_model(model: Model) -> dict[str, str]:
    mistakes: dict[str, str] = {}
    if model.weights is not None and model.pretrained:
        mistakes["model.weights"] = "none with model.pretrained=true: a run begins from one of them"
    frozen = model.freeze_body or model.freeze
    if model.freeze_body and model.freeze:
        mistakes["model.freeze"] = "none with model.freeze-body=true, which freezes all but the last layer"
    if model.freeze_epochs is not None and not frozen:
        mistakes["model.freeze-epochs"] = "none without model.freeze-body or model.freeze: nothing is frozen"
    return mistakes


def _contradictions_of_schedule(config: Config) -> dict[str, str]:
    schedule, mistakes = config.schedule, dict[str, str]()
    if schedule.warmup_epochs > config.epochs:
        mistakes["schedule.warmup-epochs"] = f"at most the {config.epochs:g} epochs of the run"
    is_own = parse_reference("schedule.name", schedule.name) is not None
    if config.ema.scale_decay and schedule.name not in FALLING and not is_own:
        mistakes["ema.scale-decay"] = f"false without schedule.name {', '.join(FALLING)}, which fix the epochs, too"
    return mistakes


def unread(config: Config, given: Mapping[str, Option]) -> list[str]:
    """Return a message for each option of `given`, those of the command line, that nothing reads in this configuration.

    An option that is turned off is not missed.
    """
    mistakes = []
    asked = {key for key in given if value(config, key) or value(config, key) != value(Config(), key)}
    for key, needs in declared(Needs):
        if key in asked and (advice := _missing(config, needs)):
            mistakes.append(f"--{key}: nothing reads it {advice}, or leave it out ({given[key].origin}).")
    return mistakes


def _missing(config: Config, needs: Needs) -> str:
    """Return what keeps an option from being read, and what to give for it; "" if it is read."""
    others = needs.options.split()
    settings = [value(config, key) for key in others]
    if needs.not_values:
        return f"with {others[0]}={settings[0]}; choose another one" if settings[0] in needs.not_values else ""
    if needs.values:
        choice = f"--{others[0]} {' or '.join(needs.values)}"
        return "" if settings[0] in needs.values else f"with {others[0]}={settings[0]}; give {choice}"
    if any(settings):
        return ""
    true = " true" if settings[0] is False else ""
    return f"without {' or '.join(others)}; give {' or '.join(f'--{key}{true}' for key in others)}"


def check_channels(augment: Augment, channels: int, full_scale: int) -> None:
    """Raise UserError if images with this number of channels, and this pixel value for white, cannot be augmented."""
    needs = {
        f"policy {augment.policy}": augment.policy != "none",
        "own": augment.own != "none",
    }
    for option in (option for option, is_set in needs.items() if is_set):
        if full_scale != 255:
            raise UserError(
                f"--augment.{option}: needs images of uint8; the data has float tensors. Return uint8 tensors or PIL "
                "images from the Dataset, or turn it off."
            )
        if channels not in (1, 3) and option != "own":
            raise UserError(
                f"--augment.{option}: needs images of 1 or 3 channels; the data has {channels}. Turn it off."
            )


def check_resize(augment: Augment, size: int) -> None:
    """Raise UserError if images are resized to less than the input of `size` pixels."""
    if augment.resize is not None and augment.resize < size:
        raise UserError(
            f"--augment.resize: found {augment.resize}, but the model's input has {size} pixels; use {size} or more."
        )


# Whether what --data.root names is there. The command line asks this before it imports torch.


def check_root(data: Data) -> None:
    """Raise UserError if the data is to be on this machine, and is not where --data.root says."""
    root, kind = data.root, data.name.partition("/")[0]
    if is_url(root):
        if parse_reference("data.name", data.name) is None:
            check_protocol(root)
        return
    if kind == "digits" and root != Data().root:
        # Whoever names own data and leaves out the name, whose default is digits, must not get a model of digits.
        own = "csv" if root.suffix.lower() == ".csv" else "folder"
        raise UserError(
            f"--data.root {root}: --data.name is digits, which come with the package and are not read from there. "
            f"For your own data give its kind, too: --data.name {own}."
        )
    if kind == "folder" and not root.is_dir():
        what = "is a file, not a folder" if root.exists() else "does not exist"
        hint = {".csv": " To train on a table, give --data.name csv.", ".tar": " Unpack a tar file first."}
        raise UserError(
            f"--data.root {root} {what}; name the folder that holds train/ or the class folders."
            f"{hint.get(root.suffix.lower(), '')}"
        )
    if kind == "csv" and not root.is_file():
        what = "is not a regular file" if root.exists() else "does not exist"
        raise UserError(f"--data.root {root} {what}; name a CSV file.")
    if (kind == "wds" or data.name == "hfds/parquet") and not root.exists():
        files = "shards" if kind == "wds" else "Parquet files"
        raise UserError(f"--data.root {root} does not exist; name the folder of the {files}.")
