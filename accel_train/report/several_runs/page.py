"""The page that compares several runs: what can be told first, then what it is told from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.report.several_runs.compared import Compared, groups_of
from accel_train.report.several_runs.curves import curves_of
from accel_train.report.several_runs.differences import Difference, pairs
from accel_train.report.several_runs.images.confusion import ConfusionChange, confusion_change
from accel_train.report.several_runs.images.pictures import OneSided, disagreement
from accel_train.report.several_runs.seeds import seeds_table
from accel_train.report.several_runs.statistics import spread
from accel_train.report.several_runs.tables import cost_table, interval_of, links, results_rows, settings_rows
from accel_train.report.several_runs.verdict import verdict_of
from accel_train.report.several_runs.words import (
    chance_text,
    names_of_groups,
    percent_between,
    points,
    points_between,
    size_in_points,
)
from accel_train.report.shared.render import render

BESIDE = 5
"""Up to so many runs have a column each in the tables; more of them a row each."""
PAIRS = 3
"""Pairs of runs whose pictures and confusion are shown: those of the first given runs."""


@dataclass(frozen=True)
class Bar:
    """An interval as a bar: where it begins, how wide it is and where its value is, in percent of the track."""

    start: float
    width: float
    value: float
    dots: tuple[float, ...] = ()


@dataclass(frozen=True)
class Pair:
    """Two runs on the same images, image by image."""

    first: str
    second: str
    sides: list[OneSided]
    note: str
    """Why the sides have no pictures."""
    confusion: ConfusionChange | None


def page_of_runs(
    runs: Sequence[Compared],
    of_settings: Sequence[Difference],
    of_runs: Sequence[Difference],
    output: Path,
    *,
    trust_code: bool = False,
) -> str:
    """The page. `output`: where it will be, for links to the reports of the runs. `trust_code`: see `read_config`."""
    groups = groups_of(runs)
    names = names_of_groups(groups)
    return render(
        "report/several_runs/runs.html",
        title=" and ".join(each.name for each in runs) if len(runs) == 2 else f"{len(runs)} runs compared",
        split=runs[0].split,
        verdict=verdict_of(runs, of_settings, of_runs),
        notes=[f"{each.name}: {each.note}" for each in runs if each.note],
        beside=len(runs) <= BESIDE,
        heads=links(runs, output),
        settings=settings_rows(runs),
        of_settings=_rows(of_settings),
        by_setting=_by_setting(groups, names),
        of_runs=_rows(of_runs),
        by_run=_by_run(runs) if len(runs) > 1 else [],
        results=results_rows(runs),
        seeds=seeds_table(runs),
        shown=_pairs(runs, of_runs, trust_code=trust_code),
        curves=curves_of(runs, groups, names),
        costs=cost_table(runs),
    )


def _pairs(runs: Sequence[Compared], of_runs: Sequence[Difference], *, trust_code: bool) -> list[Pair]:
    found = list[Pair]()
    known = [pair for pair, difference in zip(pairs(runs), of_runs, strict=True) if not difference.problem]
    # Those of different settings first: two seeds of one setting show what noise does.
    known.sort(key=lambda pair: len(groups_of(pair)) == 1)
    for first, second in known[:PAIRS]:
        assert first.answers is not None and second.answers is not None
        sides, note = disagreement(first, second, trust_code=trust_code)
        found.append(Pair(first.name, second.name, sides, note, confusion_change(first.answers, second.answers)))
    return found


def _rows(differences: Sequence[Difference]) -> list[dict[str, Any]]:
    """The table of the differences: texts, and the intervals on one scale around 0."""
    intervals = [each.interval for each in differences if each.interval]
    reach = 1.05 * max((abs(bound) for interval in intervals for bound in interval), default=1.0) or 1.0
    several = len(intervals) > 1
    rows = []
    for each in differences:
        row: dict[str, Any] = {"of": each, "value": "", "bar": None, "adjusted": ""}
        if each.value is not None:
            row["value"] = points(each.value)
        if each.interval and each.value is not None and each.p_value is not None:
            row |= {
                "interval": points_between(each.interval),
                "bar": _bar(each.interval, each.value, -reach, reach),
                "p": chance_text(each.p_value).removeprefix("=\u00a0"),
                "adjusted": chance_text(each.adjusted_p_value or 0.0).removeprefix("=\u00a0") if several else "",
            }
        rows.append(row)
    return rows


def _by_setting(groups: Sequence[Sequence[Compared]], names: Sequence[str]) -> list[dict[str, Any]]:
    """The scores of the runs of each setting, with the interval of their mean; [] if no setting has two."""
    scores = [[each.score for each in group if each.score is not None] for group in groups]
    if not any(len(values) > 1 for values in scores):
        return []
    found = [(name, values, spread(values)) for name, values in zip(names, scores, strict=True) if values]
    bounds = [value for _, values, (_, _, *ends) in found for value in (*values, *ends) if value is not None]
    low, high = _scale(bounds)
    rows = []
    for name, values, (mean, deviation, *ends) in found:
        interval = None if ends[0] is None or ends[1] is None else (ends[0], ends[1])
        bar = _bar(interval or (mean, mean), mean, low, high, values)
        small = "of one run there is none" if interval is None else percent_between(*interval)
        small = "all the same: no spread to judge by" if deviation == 0 else small
        spread_text = "" if deviation is None else size_in_points(deviation)
        rows.append(
            {"name": name, "runs": len(values), "mean": f"{mean:.2%}", "sd": spread_text, "interval": small, "bar": bar}
        )
    return rows


def _by_run(runs: Sequence[Compared]) -> list[dict[str, Any]]:
    """The accuracy of each run with its interval, on one scale."""
    found = [(each, each.score, interval_of(each)) for each in runs]
    known = [(each, score, interval) for each, score, interval in found if score is not None and interval is not None]
    if not known:
        return []
    low, high = _scale([bound for _, _, interval in known for bound in interval])
    return [
        {
            "name": each.name,
            "value": f"{score:.2%}",
            "interval": percent_between(*interval),
            "bar": _bar(interval, score, low, high),
        }
        for each, score, interval in known
    ]


def _scale(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.01
    return low - margin, high + margin


def _bar(interval: tuple[float, float], value: float, low: float, high: float, dots: Sequence[float] = ()) -> Bar:
    def place(number: float) -> float:
        return round(100 * (number - low) / (high - low), 2)

    start, end = map(place, interval)
    return Bar(start, round(end - start, 2), place(value), tuple(map(place, dots)))
