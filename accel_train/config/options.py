"""A recipe file and the command line become one validated `Config`.

A recipe is turned into the same options as the command line's, put in front of them (the later one wins)
and parsed once, by tyro. So a slip gets the same words in a file and on the command line, and its origin.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from accel_train.config import schema as configuration
from accel_train.config.recipe import Option, read_recipe, recipe_about, recipe_names, recipe_text
from accel_train.config.schema import Config
from accel_train.config.synonyms import advice
from accel_train.errors import UserError, nearest

__all__ = ["option_types", "parse", "parse_command", "recipe_about", "recipe_names", "recipe_text"]

COMMAND_LINE = "command line"
Kinds = Mapping[str, Any]  # key of each option -> type of its value
T = TypeVar("T")


def parse(arguments: Sequence[str], prog: str = "accel-train train") -> Config:
    """The configuration of `RECIPE [--key value …]`.

    `--help` prints the options (the defaults are the recipe's, if one is named) and raises SystemExit(0).
    Raises UserError, in one line, for whatever is wrong with the recipe or the options.
    """
    if "-h" in arguments or "--help" in arguments:
        named = [argument for argument in arguments[:1] if not argument.startswith("-")]
        _help(
            Config,
            f"{prog} RECIPE",
            "Train an image classifier. RECIPE is the path of a YAML file, or one of "
            f"{', '.join(recipe_names())}. Each option changes one value of the recipe.",
            default=parse(named, prog) if named else Config(),
        )
    if not arguments:
        raise UserError(f"no recipe: {prog} RECIPE [--key value …]; `accel-train recipes` lists the recipes.")
    if arguments[0].startswith("-"):
        raise UserError(f"the recipe comes before the options: {prog} RECIPE {arguments[0]} …")
    recipe, kinds = read_recipe(arguments[0]), option_types()
    for option in list(recipe.options.values()):
        if option.key in _groups(kinds) and option.values == ("null",):  # `ema:` with nothing under it
            del recipe.options[option.key]
        elif option.key not in kinds:
            _unknown(option, kinds)
    options = recipe.options | _read_arguments(arguments[1:], kinds)
    config = dataclasses.replace(_to_object(Config, [], options, kinds), recipe=recipe.name)
    _check(config, options)
    return config


def parse_command(
    cls: type[T],
    arguments: Sequence[str],
    prog: str,
    *,
    positional: tuple[str, ...],
    others: tuple[str, ...] = (),
) -> tuple[T, list[str]]:
    """The line of a command other than train: `WORD… [--key value …]` -> (an object of `cls`, other options).

    `positional` are the fields of `cls` that are words without a key; options may stand before and between them.
    Options of `Config` that begin with one of `others` ("data.") are handed back as words. `--help` raises
    SystemExit(0).
    """
    usage = " ".join([prog, *(f"{name.upper()}" for name in positional)])
    if "-h" in arguments or "--help" in arguments:
        _help(cls, prog, " ".join((cls.__doc__ or "").split()))
    own = option_types(cls, without=positional)
    kinds = {key: kind for key, kind in option_types().items() if key.startswith(others)} if others else {}
    words, rest = _apart(arguments, {**own, **kinds})
    options = _read_arguments(rest, {**own, **kinds})
    if len(words) < len(positional):
        raise UserError(f"{prog}: {positional[len(words)].upper()} is missing; {usage} [--key value …]")
    found = _to_object(cls, words, {key: option for key, option in options.items() if key in own}, own)
    return found, [word for key, option in options.items() if key not in own for word in _words(option, kinds)]


# --- the command line ------------------------------------------------------------------------------------


def _read_arguments(arguments: Sequence[str], kinds: Kinds) -> dict[str, Option]:
    """The options `--key value…` or `--key=value` of a command line, by key; of two of one key, the later.

    A key is written with '_' or '-'; a switch (of type bool) needs no value. Negative numbers are values.
    """
    options: dict[str, Option] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise UserError(f"{word!r}: neither an option nor the value of one; options are written --key value.")
        key, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while rest and not equals and not _looks_like_option(rest[0]):
            values.append(rest.pop(0))
        option = Option(key.replace("_", "-"), tuple(values), COMMAND_LINE)
        if option.key not in kinds:
            _unknown(option, kinds)
        if not values and kinds[option.key] is bool:
            option = dataclasses.replace(option, values=("true",))
        options[option.key] = option
    return options


def _apart(arguments: Sequence[str], kinds: Kinds) -> tuple[list[str], list[str]]:
    """(words without a key, options with their values). An option takes one word, a switch only true or false, and one
    of many values all words up to the next option."""
    words: list[str] = []
    options: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not _looks_like_option(word):
            words.append(word)
            continue
        options.append(word)
        kind = kinds.get(word.removeprefix("--").replace("_", "-"))
        most = 0 if "=" in word else 1
        if kind is bool:
            most = int(bool(rest) and rest[0].lower() in ("true", "false"))
        elif any(typing.get_origin(part) is tuple for part in (kind, *typing.get_args(kind))):
            most = len(rest)
        while most and rest and not _looks_like_option(rest[0]):
            options.append(rest.pop(0))
            most -= 1
    return words, options


def _looks_like_option(word: str) -> bool:
    if not word.startswith("-") or word == "-":
        return False
    with contextlib.suppress(ValueError):
        float(word)
        return False
    return True


# --- what there is to be set -----------------------------------------------------------------------------


def option_types(cls: type[Any] = Config, without: tuple[str, ...] = ("recipe",)) -> Kinds:
    """Key of each option -> type of its value. `without` are no options (the program sets `recipe`)."""
    result = {}
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            result.update({f"{name}.{key}": inner for key, inner in typing.get_type_hints(kind).items()})
        elif name not in without:
            result[name] = kind
    return {key.replace("_", "-"): kind for key, kind in result.items()}


def _groups(kinds: Kinds) -> set[str]:
    return {key.partition(".")[0] for key in kinds if "." in key}


def _unknown(option: Option, kinds: Kinds) -> NoReturn:
    """Names what other trainers call so, or the nearest keys: those with the same last part (lr: optim.lr), else one
    spelled alike."""
    key = option.key
    advised = advice(key, kinds)
    if key in _groups(kinds):
        keys = ", ".join(name for name in kinds if name.startswith(f"{key}."))
        raise UserError(f"--{key}: a group of options, not one ({option.origin}).{advised} In it: {keys}.")
    last = key.rpartition(".")[2]
    by_last: dict[str, list[str]] = {}
    for name in kinds:
        by_last.setdefault(name.rpartition(".")[2], []).append(name)
    same = by_last.get(last, [])
    hint = advised or (nearest(key, same) if "." in key else "")
    if not hint and same:
        hint = f" Did you mean {' or '.join(map(repr, same))}?"
    hint = hint or nearest(key, kinds)
    if not hint:
        hint = next((nearest(name, by_last[name]) for name in by_last if nearest(last, [name])), "")
    raise UserError(f"--{key}: unknown option ({option.origin}).{hint}")


def _is(kind: Any, what: Any) -> bool:
    """Whether `what` (NoneType, Path, …) is the type `kind`, or one of those that it is a union of."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return what in (typing.get_args(kind) if is_union else (kind,))


def _expected(kind: Any) -> str:
    """What a value of this type looks like, in words."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(arguments)
    if origin is tuple:
        count = "any number of" if arguments[-1] is ... else str(len(arguments))
        return f"{count} {({int: 'whole numbers', float: 'numbers'}).get(arguments[0], 'words')}"
    if _is(kind, types.NoneType):
        return " or ".join(_expected(part) for part in arguments if part is not types.NoneType) + " or none"
    words = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path", str: "text"}
    return words[kind]


# --- options to Config -----------------------------------------------------------------------------------


def _to_object(cls: type[T], words: Sequence[str], options: Mapping[str, Option], kinds: Kinds) -> T:
    """All options, parsed by tyro at once. If it refuses, each is tried alone, to name the one at fault."""
    found = _tyro(cls, [*words, *(word for option in options.values() for word in _words(option, kinds))])
    if found is not None:
        return found
    for option in options.values():
        if _tyro(cls, [*words, *_words(option, kinds)]) is None and _tyro(cls, words) is not None:
            kind = kinds[option.key]
            value = f"found {' '.join(option.values)!r}" if option.values else "found no value"
            choices = typing.get_args(kind) if _expected(kind).startswith("one of") else ()
            hint = nearest(" ".join(option.values), choices)
            raise UserError(f"--{option.key}: expected {_expected(kind)}, {value} ({option.origin}).{hint}")
    raise UserError(f"too many words: {' '.join(words)!r}; see --help.")


def _tyro(cls: type[T], words: Sequence[str]) -> T | None:
    import tyro

    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            return tyro.cli(cls, args=list(words), config=(tyro.conf.FlagConversionOff,))
        except SystemExit:
            return None


def _words(option: Option, kinds: Kinds) -> list[str]:
    """The option as tyro reads it: True, False and None with a capital, a home folder's ~ resolved."""
    if len(option.values) != 1:
        return [f"--{option.key}", *option.values]
    kind, value = kinds[option.key], option.values[0]
    if kind is bool and value.lower() in ("true", "false"):
        value = value.capitalize()
    elif _is(kind, types.NoneType) and value.lower() in ("none", "null", "~"):
        value = "None"
    elif _is(kind, Path) and value.startswith("~/"):
        value = str(Path(value).expanduser())
    return [f"--{option.key}={value}"]


def _check(config: Config, options: dict[str, Option]) -> None:
    """Raises UserError for the first value that is out of its range."""
    finding = configuration.check(config)
    for key in option_types():
        value = configuration.value(config, key)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                finding = finding or (key, "a finite number")
    if finding:
        key, expected = finding
        found, origin = str(configuration.value(config, key)), "default"
        if key in options:
            found, origin = " ".join(options[key].values), options[key].origin
        raise UserError(f"--{key}: expected {expected}, found {found!r} ({origin}).")


def _help(cls: type[T], prog: str, description: str, default: T | None = None) -> NoReturn:
    import signal

    import tyro

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends quietly
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    flags = (tyro.conf.FlagConversionOff,)
    if cls is Config:  # this field is no option; to say so in config.py would import tyro at every start
        cls.__annotations__["recipe"] = tyro.conf.Suppress[str]
    tyro.cli(cls, prog=prog, description=description, args=["--help"], config=flags, **defaults)
    raise AssertionError("--help has returned")
