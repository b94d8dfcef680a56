"""`accel-train recipes`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from accel_train.cli.table import print_table
from accel_train.config.option_types import value
from accel_train.config.recipe import read_recipe, recipe_names
from accel_train.config.schema import Config
from accel_train.errors import UserError, is_terminal, print_line, raise_mistakes


def recipes(arguments: Sequence[str]) -> int:
    """Run `accel-train recipes`: list the packaged recipes, or print one. Return the exit code."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `recipes | head` ends quietly
    if "-h" in arguments or "--help" in arguments:
        for line in ("usage: accel-train recipes [NAME]", "", "List the recipes, or print the file of one."):
            print_line(line)
    elif len(arguments) > 1 or (arguments and arguments[0].startswith("-")):
        raise UserError(f"accel-train recipes: expected at most one NAME, found {' '.join(arguments)!r}.")
    elif arguments:
        recipe = read_recipe(arguments[0])
        raise_mistakes(recipe.mistakes)
        if is_terminal(sys.stdout):
            for line in recipe.text.rstrip("\n").split("\n"):
                print_line(line, wraps=False)
        else:
            sys.stdout.write(recipe.text)
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
