"""The options that exist: their keys, what is declared of each, and the values that words give them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from accel_train.config.declaration import Bound, Needs, StartsInEpoch, Word
from accel_train.config.recipe import Option
from accel_train.config.schema import Config
from accel_train.config.url import url_of
from accel_train.errors import nearest

OptionTypes = Mapping[str, Any]  # key of each option -> type of its value

UNIONS = (typing.Union, types.UnionType)
SET_BY_PROGRAM = ("recipe", "origin")
"""The fields of `Config` that are not options."""


@functools.cache
def option_types(cls: type[Any] = Config) -> OptionTypes:
    """Return the options that are the fields of `cls`: key ("optim.weight-decay") -> type of its value."""
    fields = _fields_of(cls)  # type: ignore[arg-type]
    return {
        key: kind
        for key, (kind, parts) in fields.items()
        if key.partition(".")[0] not in SET_BY_PROGRAM and not any(isinstance(part, Word) for part in parts)
    }


def words_of(cls: type[Any]) -> dict[str, tuple[Any, Word]]:
    """Return the fields of a command that are words without a key: name -> (type of its value, what is declared)."""
    fields = _fields_of(cls)  # type: ignore[arg-type]
    return {
        key.replace("-", "_"): (kind, part)
        for key, (kind, parts) in fields.items()
        for part in parts
        if isinstance(part, Word)
    }


M = TypeVar("M")


def declared(marker: type[M]) -> list[tuple[str, M]]:
    """Return what the fields of `Config` declare of this type: (key, the object)."""
    return [(key, each) for key, (_, parts) in _fields_of(Config).items() for each in parts if isinstance(each, marker)]


@functools.cache
def _fields_of(cls: type[Any]) -> dict[str, tuple[Any, tuple[object, ...]]]:
    """The key of each field of `cls` and of its groups -> (its type, what is declared of its group, and of it)."""
    result: dict[str, tuple[Any, tuple[object, ...]]] = {}
    hints = typing.get_type_hints(cls, include_extras=True)
    for name in (field.name for field in dataclasses.fields(cls)):
        hint = hints[name]
        kind, *parts = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
        key = name.replace("_", "-")
        if dataclasses.is_dataclass(kind) and name not in SET_BY_PROGRAM:
            inside = _fields_of(typing.cast(type[Any], kind))  # type: ignore[arg-type]
            result |= {f"{key}.{inner}": (of, (*parts, *own)) for inner, (of, own) in inside.items()}
        else:
            result[key] = kind, tuple(parts)
    return result


def value(config: Config, key: str) -> Any:
    """Return the value of an option such as "optim.lr"."""
    return operator.attrgetter(key.replace("-", "_"))(config)


def out_of_bounds(config: Config) -> dict[str, str]:
    """Return the options whose values are out of bounds: key -> the expected value, in words."""
    mistakes: dict[str, str] = {}
    for key, bound in declared(Bound):
        setting = value(config, key)
        if setting is not None and not bound.is_within(setting):
            mistakes[key] = bound.expected
    for key in option_types():
        setting = value(config, key)
        numbers = setting if isinstance(setting, tuple) else (setting,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            mistakes.setdefault(key, "a finite number")
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
    for key, _ in declared(StartsInEpoch):
        epochs = value(config, key)
        if key in asked and epochs and (min(epochs) if isinstance(epochs, tuple) else epochs) >= config.epochs:
            mistakes.append(
                f"--{key}: nothing reads it, because the run has {config.epochs:g} epochs; give fewer than these, or a "
                f"larger --epochs, or leave it out ({given[key].origin})."
            )
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


def groups(known: OptionTypes) -> set[str]:
    """Return the names of the groups of options, such as "optim"."""
    return {key.partition(".")[0] for key in known if "." in key}


def unknown_option(key: str, origin: str, known: OptionTypes) -> str:
    """Return the message for an option that does not exist. `origin`: the file and line where it was given.

    The message proposes what the option is called here if another trainer calls it so; else the options with the same
    last part (lr: optim.lr); else one with almost the same name.
    """
    from accel_train.config.synonyms import advice

    hint = advice(key, known)
    if key in groups(known):
        keys = ", ".join(name for name in known if name.startswith(f"{key}."))
        return f"--{key}: a group of options, not one ({origin}).{hint or f' In it: {keys}.'}"
    last = key.rpartition(".")[2]
    by_last: dict[str, list[str]] = {}
    for name in known:
        by_last.setdefault(name.rpartition(".")[2], []).append(name)
    same = by_last.get(last, [])
    hint = hint or (nearest(key, same) if "." in key else "")
    if not hint and same:
        hint = f" Did you mean {' or '.join(map(repr, same))}?"
    hint = hint or nearest(key, known, least=CLOSE)
    if not hint:
        hint = next((nearest(name, by_last[name]) for name in by_last if nearest(last, [name], least=CLOSE)), "")
    return f"--{key}: unknown option ({origin}).{hint}"


def is_or_contains(kind: Any, part: Any) -> bool:
    """Whether the type `kind` is `part` (NoneType, Path, …) or a union that contains it."""
    return part in (typing.get_args(kind) if typing.get_origin(kind) in UNIONS else (kind,))


def takes_many_values(kind: Any) -> bool:
    """Whether an option of this type is followed by several words."""
    return any(typing.get_origin(part) is tuple for part in (kind, *typing.get_args(kind)))


def choices(kind: Any) -> tuple[str, ...]:
    """Return the words that an option of this type accepts; () if it accepts others too."""
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def in_words(kind: Any) -> str:
    """Return what a value of this type looks like, such as "a whole number or none"."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " * (len(arguments) > 1) + ", ".join(arguments)
    if origin is tuple:
        count = "any number of" if arguments[-1] is ... else str(len(arguments))
        return f"{count} {({int: 'whole numbers', float: 'numbers'}).get(arguments[0], 'words')}"
    if is_or_contains(kind, types.NoneType):
        return " or ".join(in_words(part) for part in arguments if part is not types.NoneType) + " or none"
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        int | float: "a number",
        Path: "a path",
        str: "text",
    }
    return words[kind]


COMMAND_LINE = "command line"
CLOSE = 0.75  # of a typo to the name of an option


def read_arguments(
    arguments: Sequence[str], known: OptionTypes, mistakes: list[str], words: list[str] | None = None
) -> dict[str, Option]:
    """Return the options `--key value…` or `--key=value` of a command line, by key. The last one of a key counts.

    A key is written with '_' or '-'; a switch (of type bool) needs no value. Negative numbers are values. Unknown
    options, and words that belong to no option, are left out; a message for each is added to `mistakes`.

    With `words` a word that belongs to no option is added to these. Then an option takes one word, a switch only true
    or false, and an option of many values all words up to the next option; else each of them takes all of these.
    """
    options: dict[str, Option] = {}
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        if words is not None and not looks_like_option(word):
            words.append(word)
            continue
        key, equals, value = word[2:].partition("=")
        key = key.replace("_", "-")
        kind = known.get(key)
        values, most = ([value], 0) if equals else ([], len(remaining))
        if words is not None and kind is bool:
            most = int(most > 0 and remaining[0].lower() in ("true", "false"))
        elif words is not None and not takes_many_values(kind):
            most = min(most, 1)
        while most and not looks_like_option(remaining[0]):
            values.append(remaining.pop(0))
            most -= 1
        if not word.startswith("--") or word == "--":
            mistakes.append(f"{word!r}: neither an option nor the value of one; options are written --key value.")
            continue
        if key not in known:
            mistakes.append(unknown_option(key, COMMAND_LINE, known))
            continue
        if not values and kind is bool:
            values = ["true"]
        options[key] = Option(key, tuple(values), COMMAND_LINE)
    return options


def looks_like_option(word: str) -> bool:
    """Whether the word begins with "-" and is not a negative number."""
    if not word.startswith("-") or word == "-":
        return False
    with contextlib.suppress(ValueError):
        float(word)
        return False
    return True


def as_words(option: Option) -> list[str]:
    """Return the words of a command line that give the option."""
    return [f"--{option.key}", *option.values] if len(option.values) != 1 else [f"--{option.key}={option.values[0]}"]


def to_value(kind: Any, words: Sequence[str]) -> Any:
    """Return the value of the type `kind` that the words give. Raises ValueError if they do not fit.

    none, null and ~ are None where that is a value; ~/ is the home folder in paths only.
    """
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in UNIONS:
        if types.NoneType in parts and len(words) == 1 and words[0].lower() in ("none", "null", "~"):
            return None
        for part in (part for part in parts if part is not types.NoneType):
            with contextlib.suppress(ValueError):
                return to_value(part, words)
        raise ValueError
    if origin is tuple:
        if parts[-1] is not ... and len(words) != len(parts):
            raise ValueError
        return tuple(to_value(parts[0], [word]) for word in words)
    (word,) = words
    if origin is Literal or kind is bool:
        values = {part: part for part in parts} if parts else {"true": True, "false": False}
        word = word if parts else word.lower()
        if word not in values:
            raise ValueError
        return values[word]
    if kind is Path:
        if "://" in word:
            return url_of(word)
        return Path(word).expanduser() if word.startswith("~/") else Path(word)
    return kind(word)
