"""Medians, quartiles and ratios."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_train.bench.statistics import Spread, ratio, spread

rates = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=9)


def test_median_and_quartiles() -> None:
    assert spread([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(3.0, 2.0, 4.0, (5.0, 1.0, 4.0, 2.0, 3.0))
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0, (7.0,))


@given(rates)
def test_the_median_lies_between_the_quartiles(values: list[float]) -> None:
    found = spread(values)
    assert min(values) * (1 - 1e-9) <= found.low <= found.median <= found.high <= max(values) * (1 + 1e-9)


@given(rates, st.floats(0.01, 100))
def test_a_machine_that_slows_down_has_the_same_ratios(values: list[float], slower: float) -> None:
    found = ratio([value / 2 for value in values], values)
    drifting = ratio([value / 2 / slower for value in values], [value / slower for value in values])
    assert found.median == 0.5
    assert drifting.median == pytest.approx(0.5)
