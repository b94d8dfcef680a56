"""The options that exist: their keys, the types of their values, and what to tell a user who mistypes one."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from accel_train.config.schema import Config
from accel_train.config.synonyms import advice
from accel_train.errors import nearest

OptionTypes = Mapping[str, Any]  # key of each option -> type of its value

SET_BY_PROGRAM = ("recipe", "origin")
"""The fields of `Config` that are not options."""


REMOVED = {
    "data.decode-on": (
        "host",
        "images are decoded on the host only. Where its cores are too slow, decode once: accel-train cache-data",
    )
}
"""Options of older versions: key -> (the value with which a run or recipe of then still works, what to do instead)."""


def option_types(cls: type[Any] = Config, without: tuple[str, ...] = SET_BY_PROGRAM) -> OptionTypes:
    """Return the options that are the fields of `cls`: key ("optim.weight-decay") -> type of its value.

    The fields `without` are not options.
    """
    result = {}
    for name, kind in typing.get_type_hints(cls).items():
        if name in without:
            continue
        if dataclasses.is_dataclass(kind):
            result.update({f"{name}.{key}": inner for key, inner in typing.get_type_hints(kind).items()})
        else:
            result[name] = kind
    return {key.replace("_", "-"): kind for key, kind in result.items()}


def groups(known: OptionTypes) -> set[str]:
    """Return the names of the groups of options, such as "optim"."""
    return {key.partition(".")[0] for key in known if "." in key}


def unknown_option(key: str, origin: str, known: OptionTypes) -> str:
    """Return the message for an option that does not exist. `origin`: the file and line where it was given.

    The message proposes what the option is called here if another trainer calls it so; else the options with the same
    last part (lr: optim.lr); else one with a similar name.
    """
    if key in REMOVED and "data.root" in known:
        return f"--{key}: this option was removed; {REMOVED[key][1]} ({origin})."
    hint = advice(key, known)
    if key in groups(known):
        keys = ", ".join(name for name in known if name.startswith(f"{key}."))
        return f"--{key}: a group of options, not one ({origin}).{hint} In it: {keys}."
    last = key.rpartition(".")[2]
    by_last: dict[str, list[str]] = {}
    for name in known:
        by_last.setdefault(name.rpartition(".")[2], []).append(name)
    same = by_last.get(last, [])
    hint = hint or (nearest(key, same) if "." in key else "")
    if not hint and same:
        hint = f" Did you mean {' or '.join(map(repr, same))}?"
    hint = hint or nearest(key, known)
    if not hint:
        hint = next((nearest(name, by_last[name]) for name in by_last if nearest(last, [name])), "")
    return f"--{key}: unknown option ({origin}).{hint}"


def is_or_contains(kind: Any, part: Any) -> bool:
    """Whether the type `kind` is `part` (NoneType, Path, …) or a union that contains it."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return part in (typing.get_args(kind) if is_union else (kind,))


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
    words = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path", str: "text"}
    return words[kind]
