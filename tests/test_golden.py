"""Names, settings and figures equal the stored ones; tests/golden.py stores new ones."""

from __future__ import annotations

import copy
import math

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


def test_a_shift_is_a_difference() -> None:
    stored = golden.stored_runs()[0]["digits"]
    line = next(iter(stored))
    for figure, shifted, is_seen in (
        ("loss", math.nextafter(stored[line]["loss"], 9), False),
        ("loss", stored[line]["loss"] * 1.01, True),
        ("accuracy", stored[line]["accuracy"] + 0.03, True),
    ):
        found = copy.deepcopy(stored)
        found[line][figure] = shifted
        assert len(golden.differences(found, stored, exact=True)) == 1
        assert len(golden.differences(found, stored, exact=False)) == is_seen
    assert golden.differences({}, stored, exact=False)
