"""The median and the quartiles of a value that was measured in several rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The median of the rounds and the two quartiles: half of the rounds are between `low` and `high`."""

    median: float
    low: float
    high: float
    rounds: tuple[float, ...] = ()


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of `values`: at least one, in the order of the rounds."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], (values[0],))
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, tuple(values))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Return the spread of the ratios within each round, which do not change when the machine's speed drifts."""
    return spread([above / below for above, below in zip(numerators, denominators, strict=True)])
