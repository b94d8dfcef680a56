"""The elements of a submission: the recipe with each combination of settings and seeds, checked."""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from accel_train.config.compatibility import START_KEYS
from accel_train.config.options import given_keys, parse_variants, unknown_option
from accel_train.config.recipe import Option
from accel_train.config.schema import Config, option_types, takes_many_values, to_yaml
from accel_train.errors import UserError, raise_mistakes

MOST = 10_000
"""The most elements of one submission."""
NODES = "nodes="
LONGEST = 150  # characters of a name, which is that of a folder


@dataclass(frozen=True)
class Element:
    """A run that is to be submitted."""

    name: str
    """Its folder's name, such as "optim.lr=0.1_seed=0": letters, digits and . = + - _ only, which no shell changes."""
    options: tuple[str, ...]
    """In which it differs from the others, as words of a command line."""
    config: Config
    recipe: str
    """The text of a recipe with all of its settings."""
    nodes: int | None = None
    """On how many nodes it is to run; None: as the job script or the user's options of the scheduler say."""


def elements_of(recipe: str, arguments: Sequence[str], seeds: str | None, over: Sequence[str]) -> list[Element]:
    """Return an element for each combination of the seeds ("0-4,7"; None: the recipe's) and of the settings in `over`
    ("optim.lr=0.1,0.01") of `RECIPE [--key value …]`. "nodes=1,2,4" is no setting: the same run on so many nodes.
    Raises UserError, of elements that of the first wrong one."""
    mistakes: list[str] = []
    counts = _node_counts([text for text in over if text.startswith(NODES)], mistakes)
    axes = [_settings(text, mistakes) for text in over if not text.startswith(NODES)]
    if seeds is not None:
        axes.append([Option("seed", (str(seed),), "--seeds") for seed in _seeds(seeds, mistakes)])
    keys = [axis[0].key for axis in axes if axis]
    given = [*keys, *given_keys(arguments)]
    mistakes += [f"--over, --seeds: {key} is given twice." for key in dict.fromkeys(keys) if given.count(key) > 1]
    raise_mistakes(mistakes)
    if (count := math.prod(len(axis) for axis in axes) * len(counts)) > MOST:
        raise UserError(f"{count:,} elements, but one submission has at most {MOST:,}; submit a part of them.")
    variants = [*itertools.product(*axes)]
    elements: dict[tuple[str, int | None], Element] = {}
    for variant, config in zip(variants, parse_variants(recipe, arguments, variants), strict=True):
        text, options = to_yaml(config), tuple(_words(variant))
        for nodes in counts:
            parts = [*([] if nodes is None else [f"nodes={nodes}"]), *filter(None, [_name(variant)])]
            name = "_".join(parts) or _plain(config.recipe, 40)
            elements.setdefault((text, nodes), Element(name, options, config, text, nodes))  # 0.1 and 0.10 are one
    return [*elements.values()]


def _node_counts(texts: Sequence[str], mistakes: list[str]) -> list[int | None]:
    """Return the numbers of "nodes=1,2,4"; [None] if there is no such text."""
    if len(texts) > 1:
        mistakes.append("--over: nodes is given twice.")
    found: list[int | None] = []
    for word in texts[0].removeprefix(NODES).split(",") if texts else ():
        if re.fullmatch("[1-9][0-9]{0,4}", word):
            found.append(int(word))
        else:
            mistakes.append(f"--over: expected numbers of nodes, such as nodes=1,2,4, found {word!r}.")
    return found or [None]


def _settings(text: str, mistakes: list[str]) -> list[Option]:
    """Return the options that "key=value,value" stands for. A comma within a value is written "\\,"."""
    key, equals, values = text.partition("=")
    key, known = key.removeprefix("--").replace("_", "-"), option_types()
    if not equals:
        mistakes.append(f"--over: expected KEY=VALUE,VALUE, such as optim.lr=0.1,0.01, found {text!r}.")
    elif key not in known:
        mistakes.append(unknown_option(key, "--over", known))
    elif key in START_KEYS:
        mistakes.append(f"--over: {key} is no setting that runs can be compared by.")
    else:
        words = [value.replace("\\,", ",") for value in re.split(r"(?<!\\),", values)]
        many = takes_many_values(known[key])
        return [Option(key, tuple(word.split()) if many else (word,), "--over") for word in dict.fromkeys(words)]
    return []


def _seeds(text: str, mistakes: list[str]) -> list[int]:
    if not re.fullmatch(r"\d{1,18}(-\d{1,18})?(,\d{1,18}(-\d{1,18})?)*", text, re.ASCII):
        mistakes.append(f"--seeds: expected numbers and ranges, such as 0-4 or 1,2,7-9, found {text!r}.")
        return []
    ranges = [(int(part.partition("-")[0]), int(part.rpartition("-")[2])) for part in text.split(",")]
    mistakes += [
        f"--seeds: {first}-{last} is empty: the lower number comes first." for first, last in ranges if last < first
    ]
    if sum(last - first + 1 for first, last in ranges) > MOST:
        mistakes.append(f"--seeds: more than {MOST:,} seeds.")
        return []
    return [*dict.fromkeys(seed for first, last in ranges for seed in range(first, last + 1))]


def _words(variant: Sequence[Option]) -> list[str]:
    return [word for option in variant for word in (f"--{option.key}", *option.values)]


def _name(variant: Sequence[Option]) -> str:
    name = "_".join(f"{option.key}={_plain(' '.join(option.values), 40)}" for option in variant)
    return _plain(name, LONGEST)


def _plain(text: str, most: int) -> str:
    """Return the text, at most `most` characters and with - for those that a shell may change; then with a checksum."""
    plain = re.sub(r"[^A-Za-z0-9.=+_-]+", "-", text)[:most]
    return plain if plain == text else f"{plain}-{zlib.crc32(text.encode(errors='surrogateescape')):08x}"
