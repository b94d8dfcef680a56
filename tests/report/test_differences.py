"""The statistics of the comparison: against scipy, statsmodels and the definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from accel_train.report.several_runs.statistics import holm, mcnemar, paired_interval, spread, welch

# statsmodels 0.15.0: mcnemar([[100, b], [c, 50]], exact=b + c < 25, correction=False).pvalue
MCNEMAR = {
    (0, 0): 1.0,
    (1, 0): 1.0,
    (6, 0): 0.03125,
    (5, 12): 0.143463134765625,
    (12, 12): 1.0,
    (3, 21): 0.0002771615982055664,
    (10, 15): 0.31731050786291115,
    (40, 60): 0.04550026389635857,
    (101, 121): 0.1794948183730267,
    (59, 6): 4.9033614331951344e-11,
    (24, 1): 4.224909405005696e-06,
}
counts = st.integers(0, 3000)


def test_mcnemars_test_is_that_of_statsmodels() -> None:
    for (first, second), expected in MCNEMAR.items():
        test, p_value = mcnemar(first, second)
        assert p_value == pytest.approx(expected, rel=1e-9)
        assert ("exact" in test) == (first + second < 25)


@given(counts, counts)
def test_mcnemars_test_is_that_of_scipy(first: int, second: int) -> None:
    _, p_value = mcnemar(first, second)
    if first + second < 25:
        expected = stats.binomtest(first, first + second, 0.5).pvalue if first + second else 1.0
    else:
        expected = stats.chi2.sf((first - second) ** 2 / (first + second), 1)
    assert p_value == pytest.approx(expected, rel=1e-6, abs=1e-300)
    assert mcnemar(second, first)[1] == pytest.approx(p_value, rel=1e-12)


def score(first: int, second: int, images: int, difference: float) -> float:
    """Tango's statistic by its definition: the likelihood under the difference is maximised by search."""
    both = images - first - second

    def loss(only_first: float) -> float:
        chances = (only_first, only_first + difference, 1 - 2 * only_first - difference)
        cells = zip((first, second, both), chances, strict=True)
        return -sum(count * math.log(max(chance, 1e-300)) for count, chance in cells)

    bounds = (max(0.0, -difference), (1 - difference) / 2)
    best = optimize.minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
    variance = images * (2 * best + difference - difference**2)
    return (second - first - images * difference) / math.sqrt(variance)


@pytest.mark.parametrize(("first", "second", "images"), [(15, 32, 400), (3, 9, 50), (120, 90, 10_000), (40, 2, 90)])
def test_the_paired_interval_has_the_differences_that_the_score_test_does_not_reject(
    first: int, second: int, images: int
) -> None:
    low, high = paired_interval(first, second, images)
    z = stats.norm.ppf(0.975)
    assert score(first, second, images, low) == pytest.approx(z, abs=1e-3)
    assert score(first, second, images, high) == pytest.approx(-z, abs=1e-3)


def test_the_paired_interval_of_models_that_never_differ() -> None:
    squared = stats.norm.ppf(0.975) ** 2
    assert paired_interval(0, 0, 100) == pytest.approx((-squared / (100 + squared), squared / (100 + squared)))
    assert paired_interval(0, 0, 1)[1] < 0.8 and paired_interval(0, 5, 5)[1] == 1.0


@given(counts, counts, counts)
def test_the_paired_interval_agrees_with_the_test_and_turns_with_the_models(first: int, second: int, same: int) -> None:
    images = max(1, first + second + same)
    low, high = paired_interval(first, second, images)
    assert -1 <= low <= (second - first) / images <= high <= 1
    assert paired_interval(second, first, images) == pytest.approx((-high, -low), abs=1e-7)
    test, p_value = mcnemar(first, second)
    if "exact" not in test and abs(p_value - 0.05) > 1e-6:
        assert (low > 0 or high < 0) == (p_value < 0.05)


def test_the_paired_interval_has_the_truth_95_times_of_100() -> None:
    numbers, hits = np.random.default_rng(0), 0
    for first, second, _ in numbers.multinomial(500, [0.05, 0.08, 0.87], size=2000):
        low, high = paired_interval(int(first), int(second), 500)
        hits += low <= 0.03 <= high
    assert 0.935 < hits / 2000 < 0.965


def test_holm_is_that_of_statsmodels() -> None:
    # statsmodels 0.15.0: multipletests(values, method="holm")[1]
    assert holm([0.01, 0.04, 0.03, 0.005, 0.8]) == pytest.approx([0.04, 0.09, 0.09, 0.025, 0.8])
    assert holm([]) == [] and holm([0.5]) == [0.5]


@given(st.lists(st.floats(0, 1), max_size=30))
def test_holm_keeps_the_order_and_is_never_below_the_value(values: list[float]) -> None:
    adjusted = holm(values)
    before = np.array(values)
    assert all((adjusted >= before) & (adjusted <= np.minimum(1, before * len(values)) + 1e-12))
    order = np.argsort(values, kind="stable")
    assert all(np.diff(np.array(adjusted)[order]) >= 0) if values else not adjusted


values = st.lists(st.floats(0, 1).map(lambda value: round(value, 4)), min_size=2, max_size=8)


@given(values, values)
def test_welch_is_that_of_scipy(first: list[float], second: list[float]) -> None:
    difference, low, high, p_value = welch(first, second)
    assert difference == pytest.approx(np.mean(second) - np.mean(first), abs=1e-12)
    if len({*first}) == 1 and len({*second}) == 1:
        assert (low, high) == (difference, difference) and math.isnan(p_value)
        return
    expected = stats.ttest_ind(second, first, equal_var=False)
    assert p_value == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-9)
    interval = expected.confidence_interval(0.95)
    assert (low, high) == pytest.approx((interval.low, interval.high), rel=1e-6, abs=1e-9)


@given(values)
def test_the_spread_is_students(found: list[float]) -> None:
    mean, deviation, low, high = spread(found)
    assert mean == pytest.approx(np.mean(found)) and deviation == pytest.approx(np.std(found, ddof=1), abs=1e-12)
    half = stats.t.ppf(0.975, len(found) - 1) * np.std(found, ddof=1) / math.sqrt(len(found))
    assert (low, high) == pytest.approx((np.mean(found) - half, np.mean(found) + half), abs=1e-9)
    assert spread(found[:1]) == (found[0], None, None, None)
