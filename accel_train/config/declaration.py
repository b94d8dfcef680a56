"""The parts of an option's declaration, besides its type, default and help text: `Annotated[float, POSITIVE, …]`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from accel_train.files import json_object
from accel_train.user_code import parse_reference


@dataclass(frozen=True)
class Bound:
    """The values that an option may have beyond its type: what can be checked without data, model or device."""

    expected: str
    """In words, as in "expected a number greater than 0"."""
    is_within: Callable[[Any], bool]
    """Not asked for None."""
    full_name: Callable[[str], str] | None = None
    """The name that the configuration has for one that users may write."""
    names: tuple[str, ...] = ()
    """The names that it may have, to find the one nearest to a typo."""


def bytes_of(size: str) -> int:
    """The bytes of a size such as "200GB", "1.5 TB" or "512MiB"; 0 if it is none."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d*)?|\.\d+) ?([kKMGTP]?)(i?)B", size)
    if match is None:
        return 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGTP".index(match[2].upper() or " "))


POSITIVE = Bound("a number greater than 0", lambda x: x > 0)
NOT_NEGATIVE = Bound("a number that is not negative", lambda x: x >= 0)
FRACTION = Bound("a number from 0 to 1", lambda x: 0 <= x <= 1)  # and a probability
ABOVE_0 = Bound("a number above 0, at most 1", lambda x: 0 < x <= 1)
PART = Bound("a number of at least 0 and below 1", lambda x: 0 <= x < 1)
CHANNELS = Bound("1 or 3", lambda x: x in (1, 3))
SIZE = Bound("a size such as 256MB or 1GB", lambda x: bytes_of(x) > 0)
INTERVAL = Bound("two numbers, 0 < smallest <= largest", lambda x: 0 < x[0] <= x[1])
COUNT = Bound("a whole number from 1 to 100", lambda x: 1 <= x <= 100)
ALL_POSITIVE = Bound("numbers greater than 0", lambda x: all(number > 0 for number in x))
MILESTONES = Bound("positive epochs in increasing order", lambda x: list(x) == sorted(set(x)) and min(x, default=1) > 0)


MODEL_NAME = Bound(
    "the name of a model",
    bool,
    full_name=lambda x: x.removeprefix("timm/"),  # timm's models are called so on the hub
)
JSON_OBJECT = Bound(
    """a JSON object with names as keys, such as '{"depth": 3}'""",
    lambda x: (found := json_object(x)) is not None and all(map(str.isidentifier, found)),
)
LOSSES = ("cross_entropy", "binary_cross_entropy")
LOSS_NAME = Bound(
    f"{', '.join(LOSSES)} or FILE.py:FUNCTION",
    # A file without a function is answered where the user's code is checked.
    lambda x: x in LOSSES or parse_reference("loss.name", x) is not None or x.endswith(".py"),
    full_name=lambda x: "binary_cross_entropy" if x == "bce" else x,
    names=LOSSES,
)


OWN = Bound(
    "none or FILE.py:NAME",
    lambda x: x == "none" or parse_reference("augment.own", x) is not None or x.endswith(".py"),
)

Interpolation = Literal["bilinear", "bicubic"]

POLICIES = (
    "none", "randaugment", "trivialaugment", "augmix", "autoaugment", "autoaugment_cifar10", "autoaugment_svhn"
)  # fmt: skip
"""torchvision's policies, and none."""
TIMM_POLICIES = ("rand", "augmix", "v0", "v0r", "original", "originalr", "3a")
"""How timm's policies begin (augmix alone is torchvision's)."""
TIMM_SETS = ("tweights", "t3a", "t3aw")
"""The sets of operations of a policy rand."""


def is_policy(text: str) -> bool:
    """Whether a policy begins with a known name, and timm ignores no further part of it: each has a number, a set of
    operations is known, and there are operations.

    For the rest timm judges a policy of its own (data/image_transform.py).
    """
    name, *parts = text.split("-")
    counts = all(part in TIMM_SETS if part[:1] == "t" else re.search(r"\d", part) and part != "n0" for part in parts)
    return text in POLICIES or (name in TIMM_POLICIES and counts)


POLICY = Bound(
    f"{', '.join(POLICIES)}, or a policy of timm's with a number in each part, such as rand-m9-mstd0.5-inc1",
    is_policy,
    names=(*POLICIES, *TIMM_POLICIES),
)


BEST_METRICS = ("accuracy", "loss", "f1", "map")
"""Those of the metrics of task.py that --best-metric may name without --metrics. That file needs torch."""
TAKEN_NAMES = {
    *BEST_METRICS, "top5_accuracy", "balanced_accuracy", "precision", "recall", "calibration_error",
    "accuracy_interval", "confusion", "worst", "kind", "time", "generation", "epoch", "update", "split", "weights",
    "count", "seconds", "images", "lr", "images_per_second", "data_wait_fraction",
}  # fmt: skip
"""The keys beside which a user's metric is written: in metrics.jsonl, in evaluation-SPLIT.json, and in result.json."""
FALLING = ("cosine", "poly")
"""Schedules that fall until the last epoch, so that the number of epochs cannot change in a run."""
SCHEDULES = ("constant", "step", "multistep", "plateau", *FALLING)
OWN_SCHEDULE = "FILE.py:FUNCTION"
"""Stands for the name of any schedule of a user's own."""
ENDING = (*FALLING, OWN_SCHEDULE)
SCHEDULE_NAME = Bound(
    f"{', '.join(SCHEDULES)} or {OWN_SCHEDULE}",
    lambda x: x in SCHEDULES or parse_reference("schedule.name", x) is not None or x.endswith(".py"),
    names=SCHEDULES,
)


@dataclass(frozen=True)
class Free:
    """An option that may change when a run goes on, because it does not affect what is learned. All others do."""

    reason: str
    unless: tuple[str, ...] = ()
    """Schedules with which it does affect it."""


AFTER_FAILURE = Free("what to do about a failure; after one, the user may choose anew")
ONE_START = Free("it belongs to one start")
"""Not even compared with the run's."""


class DecidesSamples:
    """An option that decides which samples an epoch has, and in which order: it can change between epochs only."""


class EndsRun:
    """An option that decides where a run ends. It is a part of the result, which needs --allow-change to be replaced by
    a later one."""


DECIDES_SAMPLES, ENDS_RUN = DecidesSamples(), EndsRun()


@dataclass(frozen=True)
class Needs:
    """What makes the option count. Without it nothing reads the option, and a command line that gives it is refused.

    Only a command line: a recipe may have it for other values of the command line's.
    """

    options: str
    """Other options, separated by spaces, one of which must be on; without `values`: not none, false, 0 or empty."""
    values: tuple[str, ...] = ()
    """Those of the other option, if it is a choice, with which this one is read."""
    not_values: tuple[str, ...] = ()
    """Those with which it is not."""


NEEDS_EMA = Needs("ema.enabled")
NEEDS_MIXING = Needs("augment.mixup augment.cutmix")
NEEDS_WARMUP = Needs("schedule.warmup-epochs")
NEEDS_BOX = Needs("augment.crop", ("resized",))
NEEDS_SHARDS = Needs("data.order", ("shards",))
WITHOUT_MOMENTUM = (
    "adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamp", "adamw", "adan", "adopt", "lamb",
    "laprop", "lion", "mars", "nadam", "nadamw", "novograd", "radam",
)  # fmt: skip
"""Optimizers of timm's that take no momentum, but for rare variants of these."""


def ending(*suffixes: str) -> Bound:
    """The bound of a file's name that ends in one of `suffixes`, such as ".csv"."""
    return Bound(f"a name that ends in {' or '.join(suffixes)}", lambda x: x.suffix in suffixes)


@dataclass(frozen=True)
class Word:
    """A field of a command that is a word of the command line without a key, such as RUN."""

    metavar: str
    """As the help shows it."""


RECIPE_WORD = Word("RECIPE")
RUN_WORD = Word("RUN")
