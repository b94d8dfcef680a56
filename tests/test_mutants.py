"""tests/mutants.py follows the code: each of its mutants can be applied, and names tests of its room."""

from __future__ import annotations

import ast
from pathlib import Path

import mutants
from mutants import MUTANTS

PACKAGE, TESTS = mutants.ROOT / "accel_train", mutants.ROOT / "tests"


def test_each_mutant_changes_a_fragment_that_its_file_has_once() -> None:
    wrong = []
    for mutant in MUTANTS:
        text = (PACKAGE / mutant.file).read_text()
        if (count := text.count(mutant.before)) != 1:
            wrong.append(f"{mutant.file} has {count} times: {mutant.before}")
        else:
            ast.parse(text.replace(mutant.before, mutant.after))
            assert mutant.before != mutant.after
    assert not wrong
    assert len({mutant[:3] for mutant in MUTANTS}) == len(MUTANTS)


def test_the_tests_are_those_of_the_room_or_the_mutant_says_why() -> None:
    """A file of accel_train/data/sources is tested in tests/data/sources, one of accel_train itself in tests/."""
    for mutant in MUTANTS:
        folders = [TESTS / folder for folder in Path(mutant.file).parents]
        room = next(folder for folder in folders if list(folder.glob("test_*.py")))
        places = [TESTS / test for test in mutant.tests.split()]
        assert all(place.is_file() for place in places), mutant
        assert all(place.parent == room for place in places) != bool(mutant.reason), mutant
