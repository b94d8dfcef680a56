"""The recipes of published trainings have the values that tests/published.yaml says, for each option of their source.

docs/recipes.md shows the file as tables. tests/integration/test_published_recipes.py compares whole updates.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import reference
import yaml

from accel_train.config.option_types import value
from accel_train.config.options import parse
from accel_train.config.recipe import RECIPES, recipe_names
from accel_train.convert.command_line import read_command
from accel_train.convert.recipe import convert
from accel_train.convert.translation import as_list

PUBLISHED: dict[str, dict[str, Any]] = reference.published()["recipes"]


def options_of(rows: dict[str, Any]) -> set[str]:
    """The options of the source that the rows name; a row may have several."""
    return {option for row in rows for option in row.split(", ")}


def settings_of(rows: dict[str, Any]) -> dict[str, Any]:
    """Our options that the rows name, with their values."""
    return {key: expected for row in rows.values() for key, expected in row.get("here", {}).items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_recipe_has_the_values_of_the_table(name: str) -> None:
    config = parse([name])
    for option, row in PUBLISHED[name]["rows"].items():
        assert set(row) <= {"there", "here", "why"}
        here = row.get("here", {})
        for key, expected in here.items():
            assert as_list(value(config, key)) == as_list(expected), f"{option}: {key}"
        if "why" not in row:  # "equal" without words: one option, with the same value
            assert [*here.values()] == [row["there"]], option


@pytest.mark.parametrize("name", PUBLISHED)
def test_nothing_that_the_recipe_sets_is_without_a_source(name: str) -> None:
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    keys = set[str]()
    for key, setting in recipe.items():
        inner = [f"{key}.{each}" for each in setting] if isinstance(setting, dict) else [key]
        keys |= {each.replace("_", "-") for each in inner if key != "about"}
    assert keys - settings_of(PUBLISHED[name]["rows"]).keys() == {"data.root"}


@pytest.mark.parametrize("name", [name for name, of in PUBLISHED.items() if of["peer"]])
def test_no_option_of_the_command_is_forgotten(name: str) -> None:
    of = PUBLISHED[name]
    command = read_command(f"{of['command']} {of.get('defaults', '')}", of["peer"])
    assert command.given - {"data"} <= options_of(of["rows"])  # data: the folder


@pytest.mark.parametrize("name", [name for name, of in PUBLISHED.items() if of["peer"]])
def test_convert_writes_the_same_recipe(name: str) -> None:
    """With the defaults of the source, which no command names."""
    of = PUBLISHED[name]
    translation = convert(read_command(f"{of['command']} {of.get('defaults', '')}", of["peer"]))
    assert not translation.lost
    config, expected = parse([name]), settings_of(of["rows"])
    for key, setting in translation.settings.items():
        if key not in ("seed", "data.root", "data.workers", "optim.momentum"):
            assert key in expected, key
            assert as_list(value(config, key)) == as_list(setting.value), key


def test_deit_s_command_and_defaults_are_in_its_table() -> None:
    of = PUBLISHED["imagenet_deit_small"]
    given = set(re.findall(r"--(\S+)", of["command"])) - {"nproc_per_node=4", "use_env"}
    assert given <= options_of(of["rows"])


def test_each_published_recipe_is_one() -> None:
    assert PUBLISHED.keys() < {*recipe_names()}
