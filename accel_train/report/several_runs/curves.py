"""The curves of several runs over each other: of a few each run, of many the mean of each setting's runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from accel_train.report.several_runs.compared import Compared, number
from accel_train.report.shared.charts import SERIES, Chart, Line, draw
from accel_train.report.shared.names import SPLITS, figure_title

LINES = len(SERIES)  # at most, so that each has a colour of its own


@dataclass(frozen=True)
class Curves:
    """The charts, and what their colours mean."""

    legend: list[str]
    """The names of the lines, in the order of the colours."""
    charts: list[str]
    """SVG elements."""
    left_out: int = 0
    """Lines that there was no colour for."""
    of_settings: bool = False
    """Whether a line is the mean of the runs of a setting, with their range around it."""


def curves_of(runs: Sequence[Compared], groups: Sequence[Sequence[Compared]], names: Sequence[str]) -> Curves:
    """The charts of loss, main figure and --metrics. An EMA's curve takes the place of its model's.

    `groups` and `names`: of the settings, which have a line each if there are more than LINES runs: the first one, and
    those whose runs are best.
    """
    lines = [([each], each.name) for each in runs]
    if of_settings := len(runs) > LINES and len(groups) < len(runs):
        lines = [([*group], name) for group, name in zip(groups, names, strict=True)]
    shown = [lines[0], *sorted(lines[1:], key=_badness)[: LINES - 1]] if len(lines) > LINES else lines
    charts = []
    for split, title in SPLITS.items():
        for name, percent in _figures(runs).items():
            drawn = [_line(group, split, name, color) for color, (group, _) in enumerate(shown)]
            chart = Chart(f"{title} {figure_title(name)}", drawn, percent, legend=False)
            if not chart.is_empty:
                charts.append(draw(chart))
    return Curves([name for _, name in shown], charts, len(lines) - len(shown), of_settings)


def _badness(line: tuple[Sequence[Compared], str]) -> float:
    scores = [each.score for each in line[0] if each.score is not None]
    return -mean(scores) if scores else 0.0


def _figures(runs: Sequence[Compared]) -> dict[str, bool]:
    """The loss, the main figures and those of --metrics, and whether they are fractions."""
    found = {"loss": False} | dict.fromkeys((each.main for each in runs), True)
    return found | {figure.name: "%" in figure.form for each in runs for figure in each.run.figures if figure.chosen}


def _line(group: Sequence[Compared], split: str, name: str, color: int) -> Line:
    """The mean of the runs of a group over the epochs, and if there are several the range of their values."""
    found: dict[float, list[float]] = {}
    for each in group:
        for row in each.run.evaluations(split, "ema") or each.run.evaluations(split, "model"):
            epoch, value = number(row.get("epoch")), number(row.get(name))
            if epoch is not None and value is not None:
                found.setdefault(epoch, []).append(value)
    epochs = sorted(found)
    values = [found[epoch] for epoch in epochs]
    band = ([*map(min, values)], [*map(max, values)]) if any(len(each) > 1 for each in values) else None
    return Line("", epochs, [*map(mean, values)], color, band=band)
