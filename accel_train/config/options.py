"""A recipe file and the command line become one validated `Config`.

A recipe is read as the same options as the command line's, which come after them (the last one counts). So a mistake
gets the same message in a file and on the command line, with its origin. All mistakes are raised together.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from accel_train.config.contradictions import contradictions
from accel_train.config.declaration import Bound
from accel_train.config.option_types import (
    OptionTypes,
    as_words,
    choices,
    declared,
    groups,
    in_words,
    option_types,
    out_of_bounds,
    read_arguments,
    takes_many_values,
    to_value,
    unknown_option,
    unread,
    value,
    words_of,
)
from accel_train.config.recipe import Option, Recipe, not_a_run, read_recipe, read_settings
from accel_train.config.schema import Config
from accel_train.errors import UserError, nearest, raise_mistakes
from accel_train.user_code.reference import PREFIXES, resolve, texts_of
from accel_train.user_code.reference import mistakes as code_mistakes


class CommandOptions:
    """The options of a command other than train: the fields of a dataclass, whose docstring is the command's help.

    The name of the class is that of the command: FindLr is find-lr. A field that is declared as a `Word` is given
    without a key; options may come before and after it.
    """

    TRAIN_OPTIONS: ClassVar[tuple[str, ...]] = ()
    """The options of train that the command takes, too: how their keys begin, such as "data."; "": all of them."""

    def mistakes(self) -> list[str]:
        """Return a message for each value that has the right type but cannot be used."""
        return []


SEVERAL = re.compile(r"\$|\d[-,]\d")
ARRAY = " For a job array: accel-train submit RECIPE --seeds 0-4 (docs/clusters.md)."
"""How to give several seeds, or each element of an array its own."""

NEUTRAL = {
    "epochs": 10,
    "batch_size": 64,
    "optim": {"name": "adamw", "lr": 3e-4, "weight_decay": 0.05},
    "schedule": {"name": "cosine", "warmup_epochs": 1},
}
"""The recipe of a training whose command line names none: usable for most models, new or pretrained."""
NEUTRAL_IN_WORDS = "10 epochs of batches of 64, AdamW, learning rate 3e-4, cosine"

T = TypeVar("T")
C = TypeVar("C", bound=CommandOptions)


def parse(arguments: Sequence[str], prog: str = "accel-train train", *, checks_code: bool = True) -> Config:
    """Return the configuration of `[RECIPE] [--key value …]`. Files of the user's are in it with their absolute paths.

    Without a recipe the options must name the model and the data; the other values are those of NEUTRAL.

    `checks_code=False`: the user's own code need not exist here, as for the config.yaml of a run.

    Raises one UserError with all mistakes of the recipe and of the options.
    """
    if not arguments:
        raise UserError(f"no recipe: {prog} RECIPE [--key value …]; `accel-train recipes` lists the recipes.")
    mistakes: list[str] = []
    if not arguments[0].startswith("-"):
        recipe = _read_recipe(arguments[0], mistakes)
        return _to_config(recipe, read_arguments(arguments[1:], option_types(), mistakes), mistakes, checks_code)
    given = read_arguments(arguments, option_types(), mistakes)
    if not {"model.name", "data.name"} <= given.keys():
        raise UserError(
            f"the recipe comes before the options: {prog} RECIPE {arguments[0]} …; without a recipe, give --model.name "
            "and --data.name (and --data.root)."
        )
    recipe = dataclasses.replace(read_settings(NEUTRAL, "the neutral recipe"), name="neutral")
    return _to_config(recipe, given, mistakes, checks_code)


def parse_variants(
    recipe_name: str, arguments: Sequence[str], variants: Iterable[Sequence[Option]]
) -> Iterator[Config]:
    """Yield the configuration of `RECIPE [--key value …]` with the options of each of the `variants`.

    Raises one UserError with all mistakes of the first that has some.
    """
    mistakes: list[str] = []
    recipe = _read_recipe(recipe_name, mistakes)
    given = read_arguments(arguments, option_types(), mistakes)
    for variant in variants:
        yield _to_config(recipe, {**given, **{option.key: option for option in variant}}, mistakes)


def parse_run(run: Path, arguments: Sequence[str] = ()) -> Config:
    """Return the configuration of the run in the folder `run` with the options `arguments`.

    The user's own code need not exist here. Raises one UserError with all mistakes.
    """
    raise_mistakes(mistakes := not_a_run(run))
    recipe = _read_recipe(str(run / "config.yaml"), mistakes)
    return _to_config(recipe, read_arguments(arguments, option_types(), mistakes), mistakes, checks_code=False)


def parse_settings(
    recipe: str | Mapping[str, Any], arguments: Sequence[str] = (), settings: Mapping[str, Any] | None = None
) -> Config:
    """Return the configuration of a recipe with `settings`, nested as in a recipe, and the options `--key value …`.

    `recipe`: a name, or the content of a recipe; files that a dict names are relative to the working folder. What comes
    later counts. Raises one UserError with all mistakes.
    """
    mistakes: list[str] = []
    if isinstance(recipe, str):
        found = _read_recipe(recipe, mistakes)
    else:
        found = _known_options(read_settings(recipe, "the settings"), mistakes)
    if settings:
        more = read_settings(settings, "the keywords")
        more.options = {key: dataclasses.replace(each, origin="a keyword") for key, each in more.options.items()}
        found.options = found.options | _known_options(more, mistakes).options
    return _to_config(found, read_arguments(arguments, option_types(), mistakes), mistakes)


def parse_command(cls: type[C], arguments: Sequence[str]) -> tuple[C, list[str]]:
    """Parse `WORD… [--key value …]`, the line of a command other than train: (an object of `cls`, options of train).

    The options of train are checked and returned as words. Raises one UserError with all mistakes.
    """
    mistakes: list[str] = []
    options, rest = _read_command(cls, arguments, mistakes)
    if rest:
        _to_bounded_config(rest, mistakes)
    raise_mistakes(mistakes)
    assert options is not None
    return options, [word for option in rest.values() for word in as_words(option)]


def parse_command_of_recipe(cls: type[C], arguments: Sequence[str]) -> tuple[C, Config]:
    """Parse `RECIPE [--key value …]`, the line of a command that takes the options of train too.

    `cls` has a field `recipe`. Returns (an object of `cls`, the recipe's configuration). Raises one UserError with all
    mistakes of the recipe and of the options.
    """
    mistakes: list[str] = []
    options, rest = _read_command(cls, arguments, mistakes)
    name = getattr(options, "recipe", None)
    recipe = _read_recipe(name, mistakes) if name is not None else Recipe("", "")
    config = _to_config(recipe, rest, mistakes)
    assert options is not None
    return options, config


def _read_command(cls: type[C], arguments: Sequence[str], mistakes: list[str]) -> tuple[C | None, dict[str, Option]]:
    """Return (an object of `cls`, the options of train); None instead of the object if a word is missing or wrong."""
    own = option_types(cls)  # type: ignore[arg-type]
    train = {key: kind for key, kind in option_types().items() if key.startswith(cls.TRAIN_OPTIONS)}
    words: list[str] = []
    given = read_arguments(arguments, {**train, **own}, mistakes, words)
    values = _words_to_values(cls, words, mistakes)
    options = {key: option for key, option in given.items() if key in own}
    settings = {key.replace("-", "_"): setting for key, setting in _to_values(options, own, mistakes).items()}
    parsed = None if values is None else cls(**values, **settings)
    mistakes += parsed.mistakes() if parsed is not None else []
    return parsed, {key: option for key, option in given.items() if key not in own}


def _words_to_values(cls: type[CommandOptions], words: list[str], mistakes: list[str]) -> dict[str, Any] | None:
    """Return the values of the fields that are words; None if one is missing or wrong, and a message in `mistakes`."""
    fields, values = words_of(cls), dict[str, Any]()
    left = words
    for name, (kind, _) in fields.items():
        taken, left = (left, []) if takes_many_values(kind) else (left[:1], left[1:])
        if not taken and hasattr(cls, name):  # it has a default
            continue
        if not taken:
            usage = " ".join(["accel-train", command_name(cls), *map(str.upper, fields)])
            mistakes.append(f"accel-train {command_name(cls)}: {name.upper()} is missing; {usage} [--key value …]")
            return None
        try:
            values[name] = to_value(kind, taken)
        except ValueError:
            mistakes.append(f"{name.upper()}: expected {in_words(kind)}, found {' '.join(taken)!r}.")
            return None
    if left:
        mistakes.append(f"too many words: {' '.join(words)!r}; see --help.")
    return values


def command_name(cls: type[CommandOptions]) -> str:
    """Return the command whose options are the fields of `cls`: find-lr for FindLr."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()


# --- options to objects ----------------------------------------------------------------------------------


def _read_recipe(name: str, mistakes: list[str]) -> Recipe:
    """Return the recipe with those of its options that exist; add what is wrong with it to `mistakes`."""
    try:
        recipe = read_recipe(name)
    except UserError as error:
        mistakes += error.messages
        return Recipe(name, "")
    return _known_options(recipe, mistakes)


def _known_options(recipe: Recipe, mistakes: list[str]) -> Recipe:
    """Return the recipe with those of its options that exist; add what is wrong with it to `mistakes`."""
    mistakes += recipe.mistakes
    known = option_types()
    for option in [option for key, option in recipe.options.items() if key not in known]:
        del recipe.options[option.key]
        if option.key not in groups(known) or option.values != ("null",):  # `ema:` with nothing under it sets nothing
            mistakes.append(unknown_option(option.key, option.origin, known))
    return recipe


def _to_config(recipe: Recipe, given: Mapping[str, Option], mistakes: list[str], checks_code: bool = True) -> Config:
    """Return the configuration of a recipe with the options `given`. Raises one UserError with all `mistakes`: those
    that were found before, and those that are found here."""
    given = {**given}
    for key in PREFIXES.keys() & given.keys():
        given[key] = dataclasses.replace(given[key], values=tuple(resolve(key, v, Path()) for v in given[key].values))
    options = {**recipe.options, **given}
    for key, bound in declared(Bound):
        if key in options and bound.full_name is not None:
            options[key] = dataclasses.replace(options[key], values=tuple(map(bound.full_name, options[key].values)))
    config = dataclasses.replace(_to_bounded_config(options, mistakes), recipe=recipe.name)
    if not mistakes:  # a value that was left out for a mistake could cause another one here
        mistakes += [_misfit(key, expected, config, options) for key, expected in contradictions(config).items()]
    if not mistakes:
        mistakes += unread(config, given)
    for key in PREFIXES if checks_code else ():
        mistakes += [mistake for text in texts_of(value(config, key)) for mistake in code_mistakes(key, text)]
    if mistakes:
        raise_mistakes(mistakes)
    return config


def _to_bounded_config(options: Mapping[str, Option], mistakes: list[str]) -> Config:
    """Return a Config with those options whose types are right; add wrong types and values to `mistakes`."""
    config = Config()
    for key, setting in _to_values(options, option_types(), mistakes).items():
        config = _with(config, key.replace("-", "_"), setting)
    mistakes += [_misfit(key, expected, config, options) for key, expected in out_of_bounds(config).items()]
    return config


def _misfit(key: str, expected: str, config: Config, options: Mapping[str, Option]) -> str:
    written, origin = str(value(config, key)), "default"
    if key in options:
        written, origin = " ".join(options[key].values), options[key].origin
    bound = next((bound for name, bound in declared(Bound) if name == key), None)
    hint = bound.hint(written) if bound is not None and bound.hint is not None else ""
    hint = hint or nearest(written, bound.names if bound is not None else ())
    return f"--{key}: expected {expected}, found {written!r} ({origin}).{hint}"


def _to_values(options: Mapping[str, Option], known: OptionTypes, mistakes: list[str]) -> dict[str, Any]:
    """Return the values of the options by key. Those that do not fit their types are left out; a message for each is
    added to `mistakes`."""
    values: dict[str, Any] = {}
    for key, option in options.items():
        kind, text = known[key], " ".join(option.values)
        try:
            values[key] = to_value(kind, option.values)
        except ValueError:
            shown = f"found {text!r}" if option.values else "found no value"
            hint = ARRAY if key == "seed" and SEVERAL.search(text) else nearest(text, choices(kind))
            mistakes.append(f"--{key}: expected {in_words(kind)}, {shown} ({option.origin}).{hint}")
    return values


def _with(settings: T, name: str, setting: Any) -> T:
    """Return a copy of the dataclass `settings` with a field, `name` or "group.name", changed."""
    group, _, rest = name.partition(".")
    setting = _with(getattr(settings, group), rest, setting) if rest else setting
    return dataclasses.replace(settings, **{group: setting})  # type: ignore[type-var]
