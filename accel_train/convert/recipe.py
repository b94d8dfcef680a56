"""Writes a translation as a recipe file with comments."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from accel_train.config.option_types import option_types
from accel_train.convert import timm, torchvision, ultralytics
from accel_train.convert.command import Command, shown
from accel_train.convert.translation import Translation
from accel_train.errors import UserError, reason_of

TRANSLATE = {"timm": timm.translate, "torchvision": torchvision.translate, "ultralytics": ultralytics.translate}
WIDTH = 120
PLAIN = re.compile(r"[A-Za-z0-9_./][\w./-]*")


def convert(command: Command) -> Translation:
    """Return what a command of another trainer is here. Raises UserError if it trains no classifier, or if one of its
    numbers is 0, infinite or NaN where the recipe is computed with it."""
    translation = Translation(command)
    try:
        TRANSLATE[command.peer.name](translation)
    except (ArithmeticError, ValueError) as error:
        given = [name for name in sorted(command.given) if _is_odd(command.values[name])]
        odd = ", ".join(text for name in given for text in shown(command, name))
        raise UserError(f"{odd or command.text}: nothing can be computed with that ({reason_of(error)}).") from error
    return translation


def _is_odd(value: Any) -> bool:
    """Whether it is a number, but none of the usual ones."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not 0 < value < math.inf


def recipe_text(translation: Translation) -> str:
    """Return the recipe: what was converted, what is lost, differs and was left out as comments, then the settings."""
    command, blocks = translation.command, list[str]()
    blocks += _comment(f"Converted from {command.peer.name} ({command.peer.version}) by accel-train convert:")
    blocks += _comment(command.text, "  ")
    launch = list(translation.launch)
    if translation.processes > 1:
        if not any(word.startswith("--mixed_precision") for word in launch):
            launch.append("--mixed_precision no")  # the config file has bf16
        launch.insert(0, f"--config_file accelerate_configs/multi_gpu.yaml --num_processes {translation.processes}")
    start = f"accelerate launch {' '.join(launch)} -m accel_train.train" if launch else "accel-train train"
    blocks += ["# Start it with:", f"#   {start} RECIPE.yaml"]  # not wrapped, to be copied
    blocks += _comment("Values without a remark are those of the command, or that trainer's defaults.")
    lost = [f"{name}: {why}" for name, why in translation.lost.items()]
    for title, lines in (
        ("LOST: it changes what is learned, and cannot be said here:", lost),
        ("Different, without a change of what is learned, or to be known:", translation.differs),
        ("Left out, because it does not change what is learned:", [", ".join(translation.left_out)]),
    ):
        if any(lines):
            blocks += ["#", *_comment(title)]
            for line in lines:
                blocks += _comment(line, "  - ")
    return "\n".join([*blocks, "", *_settings(translation)]) + "\n"


def _comment(text: str, indent: str = "") -> Iterator[str]:
    """Yield the text as comment lines."""
    spaces = " " * len(indent)
    for line in textwrap.wrap(
        " ".join(text.split()), WIDTH - 2, initial_indent=indent, subsequent_indent=spaces, break_on_hyphens=False
    ):
        yield f"# {line}"


def _settings(translation: Translation) -> Iterator[str]:
    """Yield the lines of the settings, in the order of docs/options.md, those of a group under it."""
    group = ""
    for key in sorted(translation.settings, key=list(option_types()).index):
        setting = translation.settings[key]
        of, _, name = key.rpartition(".")
        if of and of != group:
            yield f"{of}:"
        group = of
        comment = f"  # {setting.comment}" if setting.comment else ""
        yield f"{'  ' * bool(of)}{name.replace('-', '_')}: {_value(setting.value)}{comment}"


def _value(value: Any) -> str:
    """The value as YAML that recipes read as the same."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in ("true", "false", "null", "none"):
        return value
    return json.dumps(value)
