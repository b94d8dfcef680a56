"""The recipes of published trainings have the values that tests/published.yaml says, for each option of their source.

docs/recipes.md shows the file as tables. tests/integration/test_published_recipes.py compares whole updates.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import reference
import yaml

from accel_train.config.options import parse
from accel_train.config.recipe import RECIPES
from accel_train.config.schema import value

PUBLISHED: dict[str, dict[str, Any]] = reference.published()["recipes"]


def as_list(setting: Any) -> list[Any]:
    """Return the values of an option that may have several."""
    return list(setting) if isinstance(setting, (list, tuple)) else [setting]


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


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_option_of_the_command_is_forgotten(name: str) -> None:
    """The options of the launcher before it have an underscore (--use_env), or are --nnodes."""
    of, short = PUBLISHED[name], {"wd": "weight-decay"}
    words = re.findall(r"--([\w-]+)", f"{of['command']} {of.get('defaults', '')}")
    given = {short.get(option, option) for option in words if "_" not in option and option != "nnodes"}
    assert given and given <= options_of(of["rows"])
