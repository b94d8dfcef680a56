"""`accel-train completion`: what Tab offers in a shell.

tyro completes the options of one parser. This program chooses among its commands itself, and reads options in its own
way. So the words are listed here, from the same types.
"""

from __future__ import annotations

import dataclasses
import importlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from accel_train.cli.evaluate import SIZES
from accel_train.config.option_types import choices, option_types
from accel_train.config.recipe import recipe_names
from accel_train.errors import UserError

SHELLS = ("bash", "zsh")
OF_RECIPE = ("train", "submit", "doctor", "meet", "bench", "preview", "find-lr")
OPTIONS_OF_TRAIN = dict.fromkeys(OF_RECIPE, ("",)) | {
    "evaluate": ("model.", "data.", "augment.", "eval-batch-size"),
    "predict": SIZES,
    "check-data": ("data.",),
}
"""The commands that take options of train -> the beginnings of those options' names."""
HELP = """usage: accel-train completion bash|zsh

Print the shell script that lets Tab complete commands, recipes, options and values. To install it:

  bash   echo 'eval "$(accel-train completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(accel-train completion zsh)"' >> ~/.zshrc"""

BASH = """_accel_train() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}} $before" in
{values}
            *)
                case "$current" in
                    -*) case "${{COMP_WORDS[1]}}" in
{options}
                    esac ;;
                esac ;;
        esac
    fi
    COMPREPLY=( $(compgen -W "$words" -- "$current") )
}}
complete -o default -F _accel_train accel-train
"""


def completion(arguments: Sequence[str]) -> int:
    """Run `accel-train completion`: print the script for a shell. Return the exit code."""
    if "-h" in arguments or "--help" in arguments:
        print(HELP)
        return 0
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        found = f"found {' '.join(arguments)!r}" if arguments else "found nothing"
        raise UserError(f"accel-train completion: expected one of {', '.join(SHELLS)}, {found}.")
    print(_script(arguments[0]), end="")
    return 0


def _options() -> dict[str, dict[str, tuple[str, ...]]]:
    """Return command -> option -> the values it accepts; () if it accepts others too."""
    from accel_train.cli.dispatch import COMMANDS

    found = {}
    for command, (file, _) in COMMANDS.items():
        types: Mapping[str, Any] = {}
        module = importlib.import_module(f"accel_train.cli.{file}")
        own = getattr(module, "".join(part.capitalize() for part in command.split("-")), None)
        if own is not None:
            types = option_types(own, without=())
        if command in OPTIONS_OF_TRAIN:
            shared = {key: kind for key, kind in option_types().items() if key.startswith(OPTIONS_OF_TRAIN[command])}
            types = {**types, **shared}
        words = _words(own)
        options = {key: kind for key, kind in types.items() if key not in words}
        found[command] = {key: ("true", "false") if kind is bool else choices(kind) for key, kind in options.items()}
    return found


def _words(cls: type[Any] | None) -> list[str]:
    """The fields of a command, its base classes' too, that are words of the command line, not options."""
    fields = () if cls is None else dataclasses.fields(cls)
    return [field.name.replace("_", "-") for field in fields if "Positional" in str(field.type)]


def _first_words(command: str) -> tuple[str, ...]:
    """Return what Tab offers after the name of a command."""
    return tuple(recipe_names()) if command in (*OF_RECIPE, "recipes") else SHELLS if command == "completion" else ()


def _script(shell: str) -> str:
    from accel_train.cli.help import groups

    options = _options()
    values: dict[str, list[str]] = {" ".join(groups()): ["train --help"]}
    for command, keys in options.items():
        if words := _first_words(command):
            # The word before is the command itself.
            values.setdefault(" ".join(words), []).append(f"{command} {command}")
        for key, accepted in keys.items():
            if accepted:
                values.setdefault(" ".join(accepted), []).append(f"{command} --{key}")
    cases = (
        f"            {'|'.join(shlex.quote(pattern) for pattern in patterns)}) words={shlex.quote(words)} ;;"
        for words, patterns in values.items()
    )
    lists = (
        f"                        {command}) words={shlex.quote(' '.join(f'--{key}' for key in [*keys, 'help']))} ;;"
        for command, keys in options.items()
    )
    script = BASH.format(commands=" ".join(options), values="\n".join(cases), options="\n".join(lists))
    begin = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" if shell == "zsh" else ""
    return begin + script
