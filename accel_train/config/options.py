"""A recipe file and the command line become one validated `Config`.

A recipe is read as the same options as the command line's, which come after them (the last one counts). So a mistake
gets the same message in a file and on the command line, with its origin. All mistakes are raised together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types
import typing
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from accel_train.config.checks import contradictions, out_of_bounds, unread
from accel_train.config.declaration import Bound
from accel_train.config.recipe import Option, Recipe, read_recipe, read_settings
from accel_train.config.schema import (
    UNIONS,
    Config,
    OptionTypes,
    choices,
    declared,
    groups,
    in_words,
    option_types,
    positional_words,
    takes_many_values,
    value,
)
from accel_train.config.url import url_of
from accel_train.errors import UserError, how_to_get, nearest, raise_mistakes
from accel_train.user_code import PREFIXES, resolve, texts_of
from accel_train.user_code import mistakes as code_mistakes


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """The options of a command other than train: the fields of a dataclass, whose docstring is the command's help.

    The name of the class is that of the command: FindLr is find-lr. A field that is declared as a `Word` is given
    without a key; options may come before and after it.
    """

    TRAIN_OPTIONS: ClassVar[tuple[str, ...]] = ()
    """The options of train that the command takes, too: how their keys begin, such as "data."; "": all of them."""

    traceback: bool = False
    """Show the traceback of an error too."""

    def mistakes(self) -> list[str]:
        """Return a message for each value that is within its bounds but cannot be used."""
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


def parse(arguments: Sequence[str], *, checks_code: bool = True) -> Config:
    """Return the configuration of `[RECIPE] [--key value …]`. Files of the user's are in it with their absolute paths.

    Without a recipe the options must name the model and the data; the other values are those of NEUTRAL.

    `checks_code=False`: the user's own code need not exist here, as for the config.yaml of a run.

    Raises one UserError with all mistakes of the recipe and of the options.
    """
    mistakes: list[str] = []
    given, words = read_arguments(arguments, option_types(), mistakes)
    mistakes += _unexpected(words[1:])
    if words:
        recipe = _read_recipe(words[0], mistakes)
    elif {"model.name", "data.name"} <= given.keys():
        recipe = dataclasses.replace(read_settings(NEUTRAL, "the neutral recipe"), name="neutral")
    else:
        raise UserError(
            *mistakes,
            "no recipe: accel-train train RECIPE [--key value …]; `accel-train recipes` lists the recipes. Without a "
            "recipe, give --model.name and --data.name (and --data.root).",
        )
    return _to_config(recipe, given, mistakes, checks_code)


def parse_variants(
    recipe_name: str, arguments: Sequence[str], variants: Iterable[Sequence[Option]]
) -> Iterator[Config]:
    """Yield the configuration of `RECIPE [--key value …]` with the options of each of the `variants`.

    Raises one UserError with all mistakes of the first that has some.
    """
    mistakes: list[str] = []
    recipe = _read_recipe(recipe_name, mistakes)
    given, words = read_arguments(arguments, option_types(), mistakes)
    mistakes += _unexpected(words)
    for variant in variants:
        yield _to_config(recipe, {**given, **{option.key: option for option in variant}}, mistakes)


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
    given, words = read_arguments(arguments, option_types(), mistakes)
    mistakes += _unexpected(words)
    return _to_config(found, given, mistakes)


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
    given, words = read_arguments(arguments, {**train, **own}, mistakes)
    values = _words_to_values(cls, words, mistakes)
    options = {key: option for key, option in given.items() if key in own}
    settings = {key.replace("-", "_"): setting for key, setting in _to_values(options, own, mistakes).items()}
    parsed = None if values is None else cls(**values, **settings)
    if parsed is not None:
        mistakes += [_misfit(key, expected, parsed, options) for key, expected in out_of_bounds(parsed).items()]
        mistakes += parsed.mistakes()
    return parsed, {key: option for key, option in given.items() if key not in own}


def _words_to_values(cls: type[CommandOptions], words: list[str], mistakes: list[str]) -> dict[str, Any] | None:
    """Return the values of the fields that are words; None if one is missing or wrong, and a message in `mistakes`."""
    fields, values = positional_words(cls), dict[str, Any]()
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
    mistakes += _unexpected(left)
    return values


def _unexpected(words: Sequence[str]) -> list[str]:
    """Return a message for each of the words of a command line that belongs to nothing."""
    rule = "options are written --key value, and a switch is true or false"
    return [f"{word!r}: neither an option nor the value of one; {rule}." for word in words]


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


def _misfit(key: str, expected: str, config: Any, options: Mapping[str, Option]) -> str:
    written, origin = str(value(config, key)), "default"
    if key in options:
        written, origin = " ".join(options[key].values), options[key].origin
    bound = next((bound for name, bound in declared(Bound, type(config)) if name == key), None)
    hint = nearest(written, bound.names if bound is not None else ())
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


# --- words to options and values --------------------------------------------------------------------------

COMMAND_LINE = "command line"
CLOSE = 0.75  # of a typo to the name of an option


def read_arguments(
    arguments: Sequence[str], known: OptionTypes, mistakes: list[str]
) -> tuple[dict[str, Option], list[str]]:
    """Return the options `--key value` or `--key=value` of a command line, by key, and the words that belong to none.

    The last one of a key counts. A key is written with '_' or '-'. An option takes one word, one of many values all
    words up to the next option, and a switch (of type bool) only true or false, or none. Negative numbers are values.
    Unknown options are left out; a message for each is added to `mistakes`.
    """
    options: dict[str, Option] = {}
    words: list[str] = []
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        if not looks_like_option(word):
            words.append(word)
            continue
        key, equals, value = word[2:].partition("=")
        key = key.replace("_", "-")
        kind = known.get(key)
        values, most = ([value], 0) if equals else ([], len(remaining))
        if kind is bool:
            most = int(most > 0 and remaining[0].lower() in ("true", "false"))
        elif not takes_many_values(kind):
            most = min(most, 1)
        while most and not looks_like_option(remaining[0]):
            values.append(remaining.pop(0))
            most -= 1
        if not word.startswith("--") or word == "--":
            mistakes += _unexpected([word])
            continue
        if key not in known:
            mistakes.append(unknown_option(key, COMMAND_LINE, known))
            continue
        if not values and kind is bool:
            values = ["true"]
        options[key] = Option(key, tuple(values), COMMAND_LINE)
    return options, words


def looks_like_option(word: str) -> bool:
    """Whether the word begins with "-" and is not a negative number."""
    if not word.startswith("-") or word == "-":
        return False
    with contextlib.suppress(ValueError):
        float(word)
        return False
    return True


def given_keys(words: Iterable[str]) -> list[str]:
    """Return the keys of the options among the words of a command line: data.root for --data_root=DIR."""
    return [word[2:].partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]


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


# --- options that do not exist ----------------------------------------------------------------------------


def unknown_option(key: str, origin: str, known: OptionTypes) -> str:
    """Return the message for an option that does not exist. `origin`: the file and line where it was given.

    The message proposes what the option is called here if another trainer calls it so; else the options with the same
    last part (lr: optim.lr); else one with almost the same name.
    """
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


SYNONYMS = {
    "optim.lr": "learning-rate base-lr initial-lr lr0",
    "optim.name": "optimizer opt optim",
    "optim.weight-decay": "wd weightdecay",
    "optim.clip": "grad-clip clip-grad clip-grad-norm gradient-clip-val max-grad-norm",
    "batch-size": "bs batch train-batch-size",
    "micro-batch-size": "gradient-accumulation-steps accumulate-grad-batches per-device-train-batch-size",
    "epochs": "max-epochs num-epochs num-train-epochs",
    "stop.updates": "max-steps max-updates",
    "stop.patience-epochs": "early-stopping patience",
    "schedule.name": "scheduler lr-scheduler sched lr-scheduler-type",
    "schedule.warmup-epochs": "warmup lr-warmup-epochs",
    "model.name": "model arch architecture",
    "model.image-size": "img-size imgsz input-size train-crop-size",
    "model.pretrained": "finetune",
    "data.root": "data-dir data-path datadir",
    "data.name": "dataset dataset-name",
    "data.val-fraction": "val-split validation-split",
    "data.workers": "num-workers nworkers dataloader-num-workers",
    "augment.policy": "aa auto-augment",
    "augment.crop-fraction": "crop-pct",
    "augment.flip": "hflip fliplr",
    "augment.vertical-flip": "vflip flipud",
    "augment.erase": "reprob random-erase",
    "loss.label-smoothing": "smoothing",
    "output-dir": "output save-dir out-dir log-dir work-dir default-root-dir",
    "log-every-updates": "log-interval print-freq logging-steps log-every-n-steps",
    "trackers": "logger report-to log-wandb",
    "bitwise": "deterministic use-deterministic-algorithms",
}
"""Option here -> its names elsewhere."""
LAUNCH = {
    "--mixed_precision bf16": "amp bf16 precision mixed-precision amp-dtype",
    "--mixed_precision fp16": "fp16 half",
    "--num_processes N": "gpus num-gpus n-gpus nproc-per-node world-size devices",
    "--num_machines N": "nodes num-nodes nnodes",
    "--dynamo_backend inductor": "compile torchcompile",
    "--config_file accelerate_configs/fsdp2.yaml": "fsdp deepspeed",
    "--config_file accelerate_configs/multi_gpu.yaml": "device strategy accelerator ddp distributed local-rank",
}
"""Option of accelerate launch -> its names elsewhere."""


def advice(key: str, known: Container[str]) -> str:
    """Return a sentence that helps a user who gives the unknown option `key` ("optim.learning-rate"), or "".

    `known`: the options of this command; no others are proposed.
    """
    word = key.lower().rpartition(".")[2]
    for option, names in LAUNCH.items():
        if word in names.split() and "data.root" in known:
            where = f"accelerate launch {option} …; see accelerate_configs/."
            return f" Set it on the launch command: {where}{how_to_get('accelerate_configs/')}"
    meant = next((option for option, names in SYNONYMS.items() if word in names.split()), "")
    return f" Did you mean {meant!r}?" if meant in known else ""
