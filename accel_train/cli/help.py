"""`accel-train train --help [GROUP|OPTION]`: the options in groups, the commonest first."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import shutil
import signal
import types
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from accel_train.config.option_types import choices, option_types, value
from accel_train.config.options import NEUTRAL_IN_WORDS, parse
from accel_train.config.recipe import recipe_names
from accel_train.config.schema import Config
from accel_train.errors import UserError, nearest, one_line, wrapped

COMMON = (
    *("epochs", "batch-size", "data.name", "data.root", "model.name", "model.pretrained", "optim.name", "optim.lr"),
    *("output-dir", "seed", "config-only"),
)
"""The options shown first; those of a group are in their group too."""
ORDER = ("common", "data", "model", "augment", "optim", "schedule", "loss", "ema")
"""The first groups; "run" has the other options without a dot in their names."""
WIDEST = 100  # characters of a line
COLUMN = 34  # where the help texts begin


def groups() -> dict[str, list[str]]:
    """Return the keys of the options by group, in the order in which --help shows them."""
    found: dict[str, list[str]] = {name: [] for name in ORDER}
    found["common"] = [*COMMON]
    for key in option_types():
        group = key.partition(".")[0] if "." in key else "run"
        if group != "run" or key not in COMMON:
            found.setdefault(group, []).append(key)
    return {name: keys for name, keys in found.items() if keys}


def train_help(arguments: Sequence[str]) -> None:
    """Print the help of `accel-train train`: with the defaults of a recipe and of one group or option, if named.

    Raises UserError if the word after --help is neither a group, an option nor a recipe.
    """
    from rich.console import Console
    from rich.text import Text

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends quietly
    at = min(arguments.index(word) for word in ("-h", "--help") if word in arguments)
    recipe = arguments[:1] if at > 0 and not arguments[0].startswith("-") else []
    after = [word for word in arguments[at + 1 : at + 2] if not word.startswith("-")]
    shown = groups()
    if after and after[0] in shown:
        shown = {after[0]: shown[after[0]]}
    elif after and (key := after[0].replace("_", "-")) in option_types():
        group = [name for name, keys in shown.items() if key in keys][-1]  # rather its own one than "common"
        shown = {group: [key]}
    elif after and not recipe and (after[0] in recipe_names() or Path(after[0]).suffix in (".yaml", ".yml")):
        recipe = after
    elif after:
        raise UserError(
            f"--help {after[0]}: unknown group or option.{nearest(after[0], [*shown, *option_types()])} "
            f"The groups: {', '.join(shown)}."
        )
    config = parse(recipe) if recipe else Config()

    console = Console(highlight=False)
    width = min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)
    head = "usage: accel-train train [RECIPE] [--key value …]\n"
    if len(shown) > 1:
        head += (
            "\nTrain an image classifier. Each option changes one value of the recipe.\n\n"
            f"RECIPE is the path of a YAML file, or one of {', '.join(recipe_names())}. Without one, give "
            f"--model.name and --data.name; the other values are those of a plain recipe: {NEUTRAL_IN_WORDS}.\n"
        )
    console.print(Text(wrapped(head, width)), soft_wrap=True)
    for name, keys in shown.items():
        console.print(Text(name, style="bold"), soft_wrap=True)
        for key in keys:
            for line in _lines(key, config, width):
                console.print(Text(one_line(line)), soft_wrap=True)
        console.print()
    if len(shown) > 1:
        last = f"accel-train train --help GROUP shows one group: {', '.join(shown)}. --help optim.lr shows one option."
        console.print(Text(wrapped(last, width)), soft_wrap=True)


@cache
def help_texts() -> dict[str, str]:
    """Return the help text of each option: the string under its field."""
    found = {}
    for name, kind in typing.get_type_hints(Config).items():
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            found.update({f"{name}.{key}": text for key, text in _strings_under_fields(kind)})
    found.update(_strings_under_fields(Config))
    return {key.replace("_", "-"): text for key, text in found.items()}


def _strings_under_fields(cls: type[Any]) -> Iterator[tuple[str, str]]:
    tree = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)):
            continue
        if isinstance(field.target, ast.Name) and isinstance(below.value, ast.Constant):
            yield field.target.id, " ".join(str(below.value.value).split())


def _lines(key: str, config: Config, width: int) -> Iterator[str]:
    """Return the lines of an option: its name and the form of its value, then its help text and its default."""
    default = value(config, key)
    text = help_texts()[key]
    if default is not None:
        text += f" (default: {written(default)})"
    name = f"  --{key} {form(option_types()[key])}"
    column = COLUMN if width >= 2 * COLUMN else 6
    if len(name) + 2 > column:
        yield from wrapped(name, width).split("\n")
        name = ""
    for number, line in enumerate(wrapped(text, width - column).split("\n")):
        yield f"{name if number == 0 else '':<{column}}{line.strip()}"


def written(default: Any) -> str:
    """Return a value as one types it."""
    if isinstance(default, tuple):
        return " ".join(map(written, default)) or "none"
    return str(default).lower() if isinstance(default, bool) else str(default)


def form(kind: Any) -> str:
    """Return the form of an option's value: "INT", "norm|value|agc"."""
    parts = [part for part in typing.get_args(kind) if part is not types.NoneType]
    if kind == int | float:
        return "NUMBER"
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return "|".join(map(form, parts))
    if choices(kind):
        return "|".join(choices(kind))
    if typing.get_origin(kind) is tuple:
        return f"{form(parts[0])} …" if parts[-1] is ... else " ".join(map(form, parts))
    return {bool: "true|false", int: "INT", float: "NUMBER", Path: "PATH", str: "TEXT"}[kind]
