"""`accel-train recipes`."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from accel_train.config.recipe import read_recipe, recipe_names
from accel_train.config.schema import Config, value
from accel_train.errors import UserError, raise_mistakes
from accel_train.records.table import print_table


def recipes(arguments: Sequence[str]) -> int:
    """Run `accel-train recipes`: list the packaged recipes, or print one. Return the exit code."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `recipes | head` ends quietly
    if "-h" in arguments or "--help" in arguments:
        print("usage: accel-train recipes [NAME]\n\nList the recipes, or print the file of one.")
    elif len(arguments) > 1 or (arguments and arguments[0].startswith("-")):
        raise UserError(f"accel-train recipes: expected at most one NAME, found {' '.join(arguments)!r}.")
    elif arguments:
        recipe = read_recipe(arguments[0])
        raise_mistakes(recipe.mistakes)
        print(recipe.text, end="")
    else:
        print_table(["recipe", "data", "model", "reproduces", "expected accuracy"], _rows())
    return 0


def _rows() -> list[list[str]]:
    rows = []
    for name in recipe_names():
        recipe, default = read_recipe(name), Config()
        data, model = (
            " ".join(recipe.options[key].values) if key in recipe.options else value(default, key)
            for key in ("data.name", "model.name")
        )
        rows.append([name, data, model, recipe.about.get("reproduces", ""), recipe.about.get("accuracy", "")])
    return rows
