"""Names, settings and figures equal the stored ones; tests/golden.py stores new ones."""

from __future__ import annotations

import golden
import pytest

from accel_train.config.recipe import recipe_names

HOW = "If it is meant so: python tests/golden.py --write"


def test_the_options_have_the_stored_names() -> None:
    assert golden.options().splitlines() == (golden.FOLDER / "options.txt").read_text().splitlines(), HOW


def test_each_recipe_is_stored() -> None:
    assert sorted(path.stem for path in (golden.FOLDER / "recipes").iterdir()) == sorted(recipe_names()), HOW


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_has_the_stored_settings(name: str) -> None:
    stored = golden.FOLDER / "recipes" / f"{name}.yaml"
    assert stored.exists() and golden.recipe(name) == stored.read_text(), HOW


@pytest.mark.parametrize("name", golden.RUNS)
def test_a_run_learns_what_is_stored(name: str) -> None:
    """Bitwise equal with the torch and CPU of the stored figures, else within rounding."""
    runs, computed_with = golden.stored_runs()
    found = golden.trained(golden.RUNS[name])
    assert golden.differences(found, runs[name], exact=golden.computed_with() == computed_with) == [], f"{HOW}-runs"
