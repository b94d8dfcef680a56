"""Figures that were measured several times: their median, with the quartiles as their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The median of some rounds and the two quartiles: half of the rounds lie from `low` to `high`."""

    median: float
    low: float
    high: float
    rounds: tuple[float, ...] = ()


def spread(values: Sequence[float]) -> Spread:
    """`values`: at least one, in the order of the rounds."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], (values[0],))
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, tuple(values))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Of what was measured in the same round: a machine whose speed drifts has the same ratios."""
    return spread([above / below for above, below in zip(numerators, denominators, strict=True)])


def moved(before: Spread, now: Spread) -> bool:
    """Whether the median moved by more than the wider of the two spreads."""
    return abs(now.median - before.median) > max(before.high - before.low, now.high - now.low)
