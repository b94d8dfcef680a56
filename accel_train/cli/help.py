"""The help of every command, and what Tab offers: an argparse parser from the declarations of the options.

The parser shows options and completes them. config/options.py reads them: it says all mistakes of a line at once, and
what a misspelt option may mean.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import shutil
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from accel_train.cli import COMMANDS, command_class
from accel_train.config.declaration import Word
from accel_train.config.options import NEUTRAL_IN_WORDS, CommandOptions, parse_command
from accel_train.config.recipe import recipe_names
from accel_train.config.schema import UNIONS, Config, choices, option_types, positional_words, takes_many_values
from accel_train.errors import UserError, nearest, one_line, print_line

COMMON = (
    *("epochs", "batch-size", "data.name", "data.root", "model.name", "model.pretrained", "optim.name", "optim.lr"),
    *("output-dir", "seed", "config-only"),
)
"""The options shown first. The help of their own group has them, too."""
ORDER = ("common", "data", "model", "augment", "optim", "schedule", "loss", "ema")
"""The first groups; "run" has the other options without a dot in their names."""
WIDEST = 100  # characters of a line
COLUMN = 34  # where the help texts begin
TRAIN = (
    "Train an image classifier. Each option changes one value of the recipe.\n\n"
    f"RECIPE is the path of a YAML file, or one of {', '.join(recipe_names())}. Each (default: …) is the "
    "value where a recipe does not set the option; --config-only shows all values of a recipe.\n\nWithout a recipe, "
    f"give --model.name and --data.name: the other values are then {NEUTRAL_IN_WORDS}."
)


class _Format(argparse.HelpFormatter):
    """Keeps paragraphs, and breaks lines between words only, so that a name can be copied."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)
        super().__init__(prog, max_help_position=COLUMN, width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))
        return "\n\n".join(textwrap.fill(part, width, break_on_hyphens=False) for part in paragraphs)


def show_help(command: str, arguments: Sequence[str]) -> None:
    """Print the help of a command; of train that of one group or option, if it is named after --help. Raises UserError
    if there is none of this name."""
    if command == "train":
        parser = _train_parser(arguments)
    else:
        cls = command_class(command)
        words = " ".join(word.metavar for _, word in positional_words(cls).values())
        options = " [--key value …]" if option_types(cls) else ""
        parser = _parser(f"accel-train {command} {words}{options}", inspect.cleandoc(cls.__doc__ or ""))
        _add_words(parser, cls)
        _add_options(parser.add_argument_group("options"), cls, option_types(cls))
    for line in parser.format_help().splitlines():
        print_line(line)


def _parser(usage: str, description: str = "", epilog: str = "") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage=usage, description=description, epilog=epilog, formatter_class=_Format, add_help=False
    )
    vars(parser)["color"] = False  # from Python 3.14 on: `print_line` would show its commands to a terminal as text
    return parser


def _train_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    at = min(arguments.index(word) for word in ("-h", "--help") if word in arguments)
    after = next((word for word in arguments[at + 1 : at + 2] if not word.startswith("-")), "")
    shown, key = groups(), after.replace("_", "-")
    if after in shown:
        shown = {after: shown[after]}
    elif key in option_types():
        shown = {name: [key] for name, keys in shown.items() if key in keys}
        shown.pop("common" if len(shown) > 1 else "", None)
    elif after:
        raise UserError(
            f"--help {after}: unknown group or option.{nearest(after, [*shown, *option_types()])} "
            f"The groups: {', '.join(shown)}."
        )
    usage, names = "accel-train train [RECIPE] [--key value …]", ", ".join(shown)
    last = f"accel-train train --help GROUP shows one group: {names}. --help optim.lr shows one option."
    parser = _parser(usage, TRAIN, last) if len(shown) > 1 else _parser(usage)
    for name, keys in shown.items():
        others = [key for key in keys if len(shown) == 1 or name == "common" or key not in COMMON]
        _add_options(parser.add_argument_group(name), Config, others)
    return parser


def groups() -> dict[str, list[str]]:
    """Return the keys of the options by group, in the order in which --help shows them."""
    found: dict[str, list[str]] = {name: [] for name in ORDER}
    found["common"] = [*COMMON]
    for key in option_types():
        group = key.partition(".")[0] if "." in key else "run"
        if group != "run" or key not in COMMON:
            found.setdefault(group, []).append(key)
    return {name: keys for name, keys in found.items() if keys}


def _add_words(parser: argparse.ArgumentParser, cls: Any) -> None:
    for name, (kind, word) in positional_words(cls).items():
        takes = recipe_names() if word.metavar in ("RECIPE", "[NAME]") else choices(kind)
        many = "*" if takes_many_values(kind) else None
        text = help_texts(cls)[name.replace("_", "-")].replace("%", "%%")
        parser.add_argument(name, metavar=word.metavar, nargs=many, help=text, choices=takes or None, type=_type(kind))


def _add_options(group: Any, cls: Any, keys: Iterable[str]) -> None:
    """Add options of `cls` to a group of a parser."""
    for key in keys:
        kind, default = option_types(cls)[key], Config() if cls is Config else cls
        for name in key.replace("-", "_").split("."):
            default = getattr(default, name, None)
        text = help_texts(cls)[key] + (f" (default: {written(default)})" if default is not None else "")
        group.add_argument(
            f"--{key}",
            metavar=form(kind),
            help=one_line(text).replace("%", "%%"),
            choices=("true", "false") if kind is bool else choices(kind) or None,
            type=_type(kind),
        )


def _type(kind: Any) -> type[Any]:
    return Path if Path in (kind, *typing.get_args(kind)) else str


@cache
def help_texts(cls: type[Any] = Config) -> dict[str, str]:
    """Return the help text of each field of `cls`, and of the fields of its groups: the string under it."""
    texts: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if dataclasses.is_dataclass(base)]):
        texts |= dict(_strings_under_fields(base))
    for name, kind in typing.get_type_hints(cls).items():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            texts |= {f"{name}.{key}": text for key, text in _strings_under_fields(kind)}
    return {key.replace("_", "-"): text for key, text in texts.items()}


def _strings_under_fields(cls: type[Any]) -> Iterator[tuple[str, str]]:
    tree = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)):
            continue
        if isinstance(field.target, ast.Name) and isinstance(below.value, ast.Constant):
            yield field.target.id, " ".join(str(below.value.value).split())


def written(default: Any) -> str:
    """Return a value as one types it."""
    if isinstance(default, tuple):
        return " ".join(map(written, default)) or "none"
    return str(default).lower() if isinstance(default, bool) else str(default)


def form(kind: Any) -> str:
    """Return the form of an option's value: "INT", "const|rand|pixel"."""
    parts = [part for part in typing.get_args(kind) if part is not types.NoneType]
    if kind == int | float:
        return "NUMBER"
    if typing.get_origin(kind) in UNIONS:
        return "|".join(map(form, parts))
    if choices(kind):
        return "|".join(choices(kind))
    if typing.get_origin(kind) is tuple:
        return f"{form(parts[0])} …" if parts[-1] is ... else " ".join(map(form, parts))
    return {bool: "true|false", int: "INT", float: "NUMBER", Path: "PATH", str: "TEXT"}[kind]


# --- completion ------------------------------------------------------------------------------------------

RECIPES = {
    "bash": '_accel_train_recipes() {{ compgen -W "{names}" -- "$1"; compgen -f -- "$1"; }}',
    "zsh": "_accel_train_recipes() {{ _alternative 'recipes:recipe:({names})' 'files:file:_files' }}",
}
"""What completes a recipe: the names of the packaged ones, and files."""


@dataclass(frozen=True)
class Completion(CommandOptions):
    """Print the shell script that lets Tab complete commands, recipes, options and values.

    bash: put this line into ~/.bashrc: eval "$(accel-train completion bash)"

    zsh: put this line into ~/.zshrc, after compinit: eval "$(accel-train completion zsh)"
    """

    shell: Annotated[Literal["bash", "zsh"], Word("bash|zsh")]
    """The shell."""


def completion(arguments: Sequence[str]) -> int:
    """Run `accel-train completion`: print the script for a shell. Return the exit code."""
    import shtab

    shell = parse_command(Completion, arguments)[0].shell
    preamble = RECIPES[shell].format(names=" ".join(recipe_names()))
    print(shtab.complete(_whole_parser(shtab.FILE), shell, preamble=preamble))
    return 0


def _whole_parser(file: Any) -> argparse.ArgumentParser:
    """Return the parser of all commands. `file`: what shtab completes a path with."""
    whole = argparse.ArgumentParser(prog="accel-train", add_help=False)
    commands = whole.add_subparsers()
    for command, (_, summary) in COMMANDS.items():
        parser = commands.add_parser(command, help=summary, add_help=False)
        beginnings = ("",)
        if command == "train":
            parser.add_argument("recipe", metavar="RECIPE", help="", choices=recipe_names())
            parser.add_argument("--help", nargs="?", help="show the options", choices=[*groups()])
        else:
            cls = command_class(command)
            beginnings = cls.TRAIN_OPTIONS
            _add_words(parser, cls)
            _add_options(parser, cls, option_types(cls))
            parser.add_argument("--help", nargs="?", help="show the options", choices=[""])
        own = {action.option_strings[-1] for action in parser._actions if action.option_strings}
        keys = [key for key in option_types() if key.startswith(beginnings) and f"--{key}" not in own]
        _add_options(parser, Config, keys)
        for action in parser._actions:
            if action.choices == recipe_names():
                action.complete = dict.fromkeys(RECIPES, "_accel_train_recipes")  # type: ignore[attr-defined]
            elif action.type is Path:
                action.complete = file  # type: ignore[attr-defined]
    return whole
