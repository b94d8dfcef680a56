"""Published commands of other trainers, as recipes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_train.config.option_types import value
from accel_train.config.options import parse
from accel_train.convert.command_line import read_command
from accel_train.convert.recipe import convert, recipe_text
from accel_train.convert.translation import Translation, as_list
from accel_train.errors import UserError

COMMANDS: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "commands.yaml").read_text())
WITH_RECIPE = [name for name, each in COMMANDS.items() if "error" not in each]


def converted(command: str, peer: str | None = None, processes: int | None = None) -> Translation:
    return convert(read_command(command, peer, processes))


def lost_options(translation: Translation) -> set[str]:
    """The names of what is lost, without values."""
    return {re.split(r"[ =]", name.lstrip("-"))[0].replace("_", "-") for name in translation.lost}


def typed(key: str, written: Any) -> Any:
    """The value as a configuration has it: a path, or a tuple of one number."""
    if isinstance(written, (dict, list)):
        return written
    return Path(written) if key == "data.root" else (written,) if key == "augment.color-jitter" else written


@pytest.mark.parametrize("name", WITH_RECIPE)
def test_a_published_command_becomes_a_recipe(name: str, tmp_path: Path) -> None:
    case = COMMANDS[name]
    translation = converted(case["command"], case.get("from"))
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_text(translation))
    config = parse([str(file)])
    for key, expected in case["is"].items():
        setting = value(config, key)
        setting = json.loads(setting) if key.endswith(".kwargs") else setting
        if expected is None:
            assert key not in translation.settings, key
        else:
            assert as_list(setting) == as_list(typed(key, expected)), key
    assert lost_options(translation) == set(case["lost"])
    assert not [why for why in translation.lost.values() if "Did you mean" in why]
    for key, written in translation.settings.items():  # nothing that was written is read as something else
        if not isinstance(written.value, dict):
            assert as_list(value(config, key)) == as_list(typed(key, written.value)), key


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - set(WITH_RECIPE)))
def test_a_command_that_trains_nothing_here_says_why(name: str) -> None:
    case = COMMANDS[name]
    with pytest.raises(UserError, match=case["error"]):
        converted(case["command"], case.get("from"))
