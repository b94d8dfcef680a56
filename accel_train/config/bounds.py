"""The values that each option may have, beyond its type: what can be checked without the data, the model or a GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

from accel_train.config.option_types import option_types
from accel_train.config.schema import Config, value
from accel_train.user_code.reference import parse_reference

POSITIVE = (
    "epochs", "batch-size", "micro-batch-size", "virtual-batch-size", "eval-batch-size", "eval-every-epochs",
    "log-every-updates",
    "data.train-limit", "data.test-limit", "data.image-size", "data.train-images", "data.test-images",
    "augment.resize", "augment.randaugment-ops", "model.image-size", "schedule.step-epochs", "checkpoint.every-epochs",
    "checkpoint.every-updates", "checkpoint.keep", "checkpoint.milestone-epochs", "optim.clip", "optim.eps",
    "rendezvous-timeout-seconds", "data.max-pixels", "stop.patience-epochs", "stop.hours",
)  # fmt: skip
NOT_NEGATIVE = (
    "seed", "data.workers", "augment.pad", "augment.mixup", "augment.cutmix", "optim.lr", "optim.weight-decay",
    "schedule.warmup-epochs", "schedule.warmup-lr", "schedule.min-lr", "schedule.patience-epochs",
    "checkpoint.every-seconds", "schedule.power", "start-timeout-seconds", "hang-timeout-seconds",
)  # fmt: skip
FRACTIONS = (  # probabilities and fractions: 0 <= x <= 1
    "augment.flip", "augment.vertical-flip", "augment.color-jitter-probability", "augment.grey", "augment.blur",
    "augment.erase", "augment.mix-probability", "optim.momentum", "optim.layer-decay",
    "loss.label-smoothing", "ema.decay", "model.dropout", "model.drop-path", "schedule.decay",
)  # fmt: skip
BOUNDS: tuple[tuple[Iterable[str], str, Callable[[Any], bool]], ...] = (
    (POSITIVE, "a number greater than 0", lambda x: x > 0),
    (NOT_NEGATIVE, "a number that is not negative", lambda x: x >= 0),
    (FRACTIONS, "a number from 0 to 1", lambda x: 0 <= x <= 1),
    (("data.val-fraction", "data.test-fraction"), "a number of at least 0 and below 1", lambda x: 0 <= x < 1),
    (("augment.randaugment-magnitude",), "a number from 0 to 30", lambda x: 0 <= x <= 30),
    (
        ("augment.color-jitter",),
        "one number, or three or four: brightness, contrast, saturation, hue; none negative, hue at most 0.5",
        lambda x: len(x) in (0, 1, 3, 4) and min(x, default=0) >= 0 and max(x[3:], default=0) <= 0.5,
    ),
    (("data.channels",), "1 or 3", lambda x: x in (1, 3)),
    (("data.classes",), "at least 2", lambda x: x >= 2),
    (("augment.scale", "augment.ratio"), "two numbers, 0 < smallest <= largest", lambda x: 0 < x[0] <= x[1]),
    (("data.range",), "two numbers, the first one smaller", lambda x: x[0] < x[1]),
    (("augment.std",), "numbers greater than 0", lambda x: all(s > 0 for s in x)),
    (
        ("schedule.milestones",),
        "positive epochs in increasing order",
        lambda x: list(x) == sorted(set(x)) and min(x, default=1) > 0,
    ),
)
"""(options, the values that are expected, in words, whether a value is one of them)."""


NAMES = {"loss.name": ("cross_entropy", "binary_cross_entropy")}
"""The names that an option may have besides those of a user's own code."""
SHORT_NAMES = {"loss.name": {"bce": "binary_cross_entropy"}}
"""option -> a short name -> the name that the configuration has for it."""


def out_of_bounds(config: Config) -> dict[str, str]:
    """Return the options whose values are out of bounds: key -> the expected value, in words."""
    mistakes: dict[str, str] = {}
    for keys, expected, is_within in BOUNDS:
        for key in keys:
            setting = value(config, key)
            if setting not in (None, "auto") and not is_within(setting):
                mistakes[key] = expected
    for key, names in NAMES.items():
        setting = value(config, key)
        if setting not in names and parse_reference(key, setting) is None and not setting.endswith(".py"):
            mistakes[key] = f"{', '.join(names)} or FILE.py:FUNCTION"
    if config.model.kwargs is not None and not _is_mapping(config.model.kwargs):
        mistakes["model.kwargs"] = """a JSON object with names as keys, such as '{"depth": 3}'"""
    for key in option_types():
        setting = value(config, key)
        numbers = setting if isinstance(setting, tuple) else (setting,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            mistakes.setdefault(key, "a finite number")
    return mistakes


def _is_mapping(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict) and all(name.isidentifier() for name in json.loads(text))
    except ValueError:
        return False


def contradictions(config: Config) -> dict[str, str]:
    """Return the options whose values do not fit those of other options: key -> the expected value, in words.

    Each value must be within its own bounds.
    """
    mistakes: dict[str, str] = {}
    if config.data.val_fraction + config.data.test_fraction >= 1:
        mistakes["data.val-fraction"] = "data.val-fraction + data.test-fraction below 1"
    size, mixes = config.virtual_batch_size, config.augment.mixup > 0 or config.augment.cutmix > 0
    possible = [n for n in range(1, config.batch_size + 1) if config.batch_size % n == 0 and not (mixes and n % 2)]
    if size is not None and possible and size not in possible:
        near = sorted(sorted(possible, key=lambda n: abs(math.log(n / size)))[:2])
        pairs = " that is even, as mixup and cutmix need" * mixes
        expected = f"a divisor of the batch size {config.batch_size}{pairs}, such as {' or '.join(map(str, near))}"
        mistakes["virtual-batch-size"] = expected
    if config.schedule.name == "multistep" and not config.schedule.milestones:
        mistakes["schedule.milestones"] = "at least one epoch for schedule.name=multistep"
    if config.model.weights is not None and config.model.pretrained:
        mistakes["model.weights"] = "none with model.pretrained=true: a run begins from one of them"
    if config.data.sampler == "balanced" and config.loss.class_weights == "balanced":
        mistakes["loss.class-weights"] = "none with data.sampler=balanced: both together correct the imbalance twice"
    if config.schedule.warmup_epochs > config.epochs:
        mistakes["schedule.warmup-epochs"] = f"at most the {config.epochs} epochs of the run"
    return mistakes
