"""How much better one run is than another, and one setting than another, and how surely."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal, TypeVar

from accel_train.report.several_runs.compared import Compared, why_not_comparable
from accel_train.report.several_runs.images.answers import why_not_the_same
from accel_train.report.several_runs.statistics import holm, mcnemar, paired_interval, welch

FEW = 4
"""Up to so many runs, or settings, each is compared with each other; more of them with the first one."""
SURE = 0.05
T = TypeVar("T")


@dataclass(frozen=True)
class Difference:
    """How much better the second of two is than the first: `value` is second - first."""

    kind: Literal["runs", "settings"]
    """Two trained models on the same images, or two settings by the means of their runs, which differ in the seed."""
    first: str
    second: str
    """Names of the runs, or of the settings."""
    figure: str = "accuracy"
    """What is compared: "accuracy", "map", or "all labels right" (the fraction of the images of which all are)."""
    value: float | None = None
    interval: tuple[float, float] | None = None
    """The 95 % interval of the value."""
    p_value: float | None = None
    """Of `test`: how often chance alone gives a difference as large as this or larger."""
    adjusted_p_value: float | None = None
    """The same for all comparisons of the page of this kind together (Holm)."""
    test: str = ""
    counts: tuple[int, int] = (0, 0)
    """Runs: images that only the first, and that only the second has right. Settings: runs of the first and second."""
    images: int = 0
    """Runs: on which both were evaluated."""
    problem: str = ""
    """Why there is no value."""

    @property
    def is_more_than_noise(self) -> bool:
        """Whether the adjusted p-value is below 0.05: of runs for these two trained models, not for their settings."""
        return self.adjusted_p_value is not None and self.adjusted_p_value < SURE


def differences_of_runs(runs: Sequence[Compared]) -> list[Difference]:
    """Each run with each other, or of more than FEW with the first: McNemar's test on the same images."""
    return _adjusted([_of_runs(first, second) for first, second in pairs(runs)])


def _of_runs(first: Compared, second: Compared) -> Difference:
    a, b = first.answers, second.answers
    several = first.run.info.multi_label
    found = Difference("runs", first.name, second.name, "all labels right" if several else "accuracy")
    if a is None or b is None:
        missing = " and ".join(each.name for each in (first, second) if each.answers is None)
        return replace(found, problem=f"there are no predictions of {missing}")
    if problem := why_not_the_same(a, b):
        return replace(found, problem=problem)
    only_first, only_second = int((a.right & ~b.right).sum()), int((b.right & ~a.right).sum())
    test, p_value = mcnemar(only_first, only_second)
    return replace(
        found,
        value=(only_second - only_first) / len(a),
        interval=paired_interval(only_first, only_second, len(a)),
        p_value=p_value,
        test=test,
        counts=(only_first, only_second),
        images=len(a),
    )


def differences_of_settings(groups: Sequence[Sequence[Compared]], names: Sequence[str]) -> list[Difference]:
    """The settings that have two runs with a score or more, each with each other, or of more than FEW with the first of
    them: Welch's test. `names`: of the groups."""
    scored = [
        ([each for each in group if each.score is not None], name) for group, name in zip(groups, names, strict=True)
    ]
    usable = [(group, name) for group, name in scored if len(group) > 1]
    return _adjusted([_of_settings(*first, *second) for first, second in pairs(usable)])


def _of_settings(first: Sequence[Compared], name: str, second: Sequence[Compared], other: str) -> Difference:
    found = Difference("settings", name, other, first[0].main, counts=(len(first), len(second)))
    problems = (why_not_comparable(first[0], each) for each in (*first[1:], *second))
    if problem := next(filter(None, problems), ""):
        return replace(found, problem=problem)
    values = [[each.score for each in group if each.score is not None] for group in (first, second)]
    value, low, high, p_value = welch(*values)
    if math.isnan(p_value):
        return replace(found, value=value, problem="all runs of a setting have the same result: no spread to judge by")
    return replace(found, value=value, interval=(low, high), p_value=p_value, test="Welch's t-test")


def pairs(items: Sequence[T]) -> list[tuple[T, T]]:
    """Each with each other, or of more than FEW the first with each other."""
    return [*combinations(items, 2)] if len(items) <= FEW else [(items[0], each) for each in items[1:]]


def _adjusted(found: list[Difference]) -> list[Difference]:
    known = [each.p_value for each in found if each.p_value is not None]
    adjusted = iter(holm(known))
    return [each if each.p_value is None else replace(each, adjusted_p_value=next(adjusted)) for each in found]
