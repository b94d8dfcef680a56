"""The words of a command line: which of them are options, and which are their values."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from accel_train.config.option_types import OptionTypes, takes_many_values, unknown_option
from accel_train.config.recipe import Option

COMMAND_LINE = "command line"


def read_arguments(arguments: Sequence[str], known: OptionTypes, mistakes: list[str]) -> dict[str, Option]:
    """Return the options `--key value…` or `--key=value` of a command line, by key. The last one of a key counts.

    A key is written with '_' or '-'; a switch (of type bool) needs no value. Negative numbers are values. Unknown
    options, and words that belong to no option, are left out; a message for each is added to `mistakes`.
    """
    options: dict[str, Option] = {}
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        key, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while remaining and not equals and not looks_like_option(remaining[0]):
            values.append(remaining.pop(0))
        if not word.startswith("--") or word == "--":
            mistakes.append(f"{word!r}: neither an option nor the value of one; options are written --key value.")
            continue
        key = key.replace("_", "-")
        if key not in known:
            mistakes.append(unknown_option(key, COMMAND_LINE, known))
            continue
        if not values and known[key] is bool:
            values = ["true"]
        options[key] = Option(key, tuple(values), COMMAND_LINE)
    return options


def separate(arguments: Sequence[str], known: OptionTypes) -> tuple[list[str], list[str]]:
    """Return (words without a key, options with their values).

    An option takes one word, a switch only true or false, and an option of many values all words up to the next option.
    """
    words: list[str] = []
    options: list[str] = []
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        if not looks_like_option(word):
            words.append(word)
            continue
        options.append(word)
        kind = known.get(word.removeprefix("--").replace("_", "-"))
        most = 0 if "=" in word else 1
        if kind is bool:
            most = int(bool(remaining) and remaining[0].lower() in ("true", "false"))
        elif takes_many_values(kind):
            most = len(remaining)
        while most and remaining and not looks_like_option(remaining[0]):
            options.append(remaining.pop(0))
            most -= 1
    return words, options


def looks_like_option(word: str) -> bool:
    """Whether the word begins with "-" and is not a negative number."""
    if not word.startswith("-") or word == "-":
        return False
    with contextlib.suppress(ValueError):
        float(word)
        return False
    return True
