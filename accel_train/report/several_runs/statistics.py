"""The arithmetic behind "more than noise": intervals and tests of differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from statistics import NormalDist

LEVEL = 0.95
FEW = 25
"""Below this number of images on which two models differ the test is the exact one."""


def mcnemar(first: int, second: int) -> tuple[str, float]:
    """Which test was made, and its two-sided p-value that two models are right equally often.

    `first`, `second`: images that only the first, or only the second, classifies correctly; all others say nothing
    about the difference (McNemar 1947, "Note on the sampling error of the difference between correlated proportions or
    percentages", Psychometrika 12). Of fewer than FEW such images exact, by the binomial distribution with 1/2; else
    (first - second)² / (first + second) is compared with chi-square of one degree of freedom, without a correction for
    continuity, so that the test and `paired_interval` agree. Dietterich 1998 ("Approximate statistical tests for
    comparing supervised classification learning algorithms", Neural Computation 10) recommends the test where each
    algorithm was trained once; he also says what it leaves out: how the result changes with another training.
    """
    from scipy.special import bdtr

    count = first + second
    if count < FEW:
        tail = float(bdtr(min(first, second), count, 0.5)) if count else 1.0
        return "McNemar's exact test", min(1.0, 2 * tail)
    # The tail of chi-square with one degree of freedom is that of both sides of the normal distribution.
    return "McNemar's test", math.erfc(abs(first - second) / math.sqrt(2 * count))


def paired_interval(first: int, second: int, images: int) -> tuple[float, float]:
    """The 95 % interval of the difference of two accuracies on the same `images`: second - first.

    `first`, `second`: as in `mcnemar`. All differences that the score test does not reject (Tango 1998, "Equivalence
    test and confidence interval for the difference in proportions for the paired-sample design", Statistics in Medicine
    17). It excludes 0 just when McNemar's test (not the exact one) rejects at 1 - LEVEL.
    """
    from scipy.optimize import brentq

    z, observed = NormalDist().inv_cdf((1 + LEVEL) / 2), (second - first) / images

    def score(difference: float) -> float:
        """How many standard errors the observed difference is above `difference`, by the likelihood under that."""
        b = -first - second + (2 * images - second + first) * difference
        c = -first * difference * (1 - difference)
        only_first = (math.sqrt(max(0.0, b * b - 8 * images * c)) - b) / (4 * images)  # most likely, as a probability
        variance = images * (2 * only_first + difference * (1 - difference))
        excess = second - first - images * difference
        return excess / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, excess) if excess else 0.0

    edge = 1 - 1e-12
    low = -1.0 if score(-edge) <= z else brentq(lambda x: max(-1e9, min(1e9, score(x))) - z, -edge, observed)
    high = 1.0 if score(edge) >= -z else brentq(lambda x: max(-1e9, min(1e9, score(x))) + z, observed, edge)
    return float(low), float(high)


def holm(values: Sequence[float]) -> list[float]:
    """The p-values of several tests, adjusted so that with 5 % at most one or more of all is below 0.05 by chance (Holm
    1979, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6)."""
    adjusted, largest = [0.0] * len(values), 0.0
    for place, number in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - place) * values[number]))
        adjusted[number] = largest
    return adjusted


def spread(values: Sequence[float]) -> tuple[float, float | None, float | None, float | None]:
    """The mean, the standard deviation, and the bounds of the mean's 95 % interval (Student 1908, "The probable error
    of a mean", Biometrika 6); of a single value only the mean."""
    from scipy.special import stdtrit

    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, None, None, None
    deviation = statistics.stdev(values)
    half = float(stdtrit(len(values) - 1, (1 + LEVEL) / 2)) * deviation / math.sqrt(len(values))
    return mean, deviation, mean - half, mean + half


def welch(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float, float]:
    """The difference of two means (second - first), the bounds of its 95 % interval, and the p-value that it is 0.

    At least two values each. They are taken as independent draws from two normal distributions, whose variances may
    differ (Welch 1947, "The generalization of Student's problem when several different population variances are
    involved", Biometrika 34). If no value differs from another of its group there is no variance to judge by: the
    interval is the difference itself, and the p-value is NaN.
    """
    from scipy.special import stdtr, stdtrit

    difference = statistics.mean(second) - statistics.mean(first)
    parts = [statistics.variance(values) / len(values) for values in (first, second)]
    total = sum(parts)
    if total == 0:
        return difference, difference, difference, math.nan
    shares = [part / total for part in parts]
    freedom = 1 / sum(share**2 / (len(values) - 1) for share, values in zip(shares, (first, second), strict=True))
    error = math.sqrt(total)
    half = float(stdtrit(freedom, (1 + LEVEL) / 2)) * error
    p_value = 2 * float(stdtr(freedom, -abs(difference) / error))
    return difference, difference - half, difference + half, p_value
