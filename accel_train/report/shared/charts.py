"""The charts of a report, as SVG that takes its colours from the page: it follows a light or a dark theme."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from accel_train.analysis.figures import BINS, accuracy_interval
from accel_train.errors import one_line
from accel_train.report.shared.plots import import_pyplot

# matplotlib draws with these placeholders, which are then replaced by the page's CSS variables.
SERIES = [f"#0102{number:02x}" for number in range(8)]
TEXT, GRID, MARK = "#030400", "#030401", "#030402"
VARIABLES = {color: f"var(--series-{number})" for number, color in enumerate(SERIES)} | {
    TEXT: "var(--text)",
    GRID: "var(--grid)",
    MARK: "var(--mark)",
}
STYLES = {"restart": "--", "rewind": ":", "skipped": "-."}  # of the lines that mark events


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    color: int = 0
    """The number of its colour."""
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    title: str
    lines: list[Line]
    percent: bool = False
    """Whether the values are fractions, shown in percent."""
    events: list[tuple[str, float]] = field(default_factory=list)
    """See `RunRecords.events`."""
    best: float | None = None
    """The best epoch, which is marked."""
    legend: bool = True
    """Whether it has a legend, if there are several lines or marks."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing but single points to show."""
        return not any(sum(value is not None for value in line.y) > 1 for line in self.lines)


def draw(chart: Chart) -> str:
    """The chart as an SVG element."""
    figure, axes = _figure(chart.title, figsize=(4.4, 2.9))
    from matplotlib.ticker import MaxNLocator  # after `_figure`, which tells the user if it is missing

    drawn: dict[str, Any] = {}
    for line in chart.lines:
        points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None]
        if points:
            (drawn[one_line(line.label)],) = axes.plot(
                *zip(*points, strict=True),
                color=SERIES[line.color % len(SERIES)],
                linestyle="--" if line.dashed else "-",
                linewidth=1.6,
                marker="o" if len(points) < 15 else None,
                markersize=3,
            )
    for kind, at in chart.events[:200]:
        drawn[kind] = axes.axvline(at, color=MARK, linewidth=0.9, linestyle=STYLES[kind])
    if chart.best is not None:
        drawn[f"best epoch: {chart.best:g}"] = axes.axvline(chart.best, color=MARK, linewidth=2.5, alpha=0.45)
    axes.set_xlabel("epoch", color=TEXT)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    if chart.percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:g}%")
    if chart.legend and len(drawn) > 1:
        legend = axes.legend(drawn.values(), drawn.keys(), frameon=False, labelcolor=TEXT, fontsize=8)
        for label in legend.get_texts():  # the name of a run may have two dollars, and is no formula
            label.set_parse_math(False)
    return _svg(figure, chart.title)


def draw_calibration(diagram: Sequence[dict[str, float]]) -> str:
    """The accuracy of each bin of probabilities with its 95 % interval, and below how many images it has, from
    `figures.calibration`."""
    figure, (axes, counts) = _figure("calibration", 2, figsize=(4.4, 4.0), sharex=True, height_ratios=(3.2, 1))
    from matplotlib.ticker import MaxNLocator

    axes.plot([0, 1], [0, 1], color=MARK, linestyle="--", linewidth=0.9, label="perfect")
    images = [round(entry["count"]) for entry in diagram]
    x, y = [entry["confidence"] for entry in diagram], [entry["accuracy"] for entry in diagram]
    bounds = [accuracy_interval(round(share * count), count) for share, count in zip(y, images, strict=True)]
    around = [
        [max(0.0, value - low) for value, (low, _) in zip(y, bounds, strict=True)],
        [max(0.0, high - value) for value, (_, high) in zip(y, bounds, strict=True)],
    ]
    label = "images of a bin, 95% interval"
    axes.errorbar(x, y, around, color=SERIES[0], fmt="o", markersize=4, elinewidth=1.2, capsize=2, label=label)
    places = [min(int(value * BINS), BINS - 1) for value in x]
    counts.bar([(place + 0.5) / BINS for place in places], images, width=0.9 / BINS, color=SERIES[0], alpha=0.7)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value * 100:g}%")
    axes.set_xlim(-0.03, 1.03)
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel("accuracy", color=TEXT, fontsize=8)
    counts.set_xlabel("probability of the predicted class", color=TEXT, fontsize=8)
    counts.set_ylabel("images", color=TEXT, fontsize=8)
    counts.yaxis.set_major_locator(MaxNLocator(nbins=2, integer=True))
    figure.legend(frameon=False, labelcolor=TEXT, fontsize=8, loc="outside lower center", ncols=2)
    return _svg(figure, "calibration")


def _figure(title: str, rows: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure and its axes, one for each of several rows, in the colours of the page and without a frame."""
    figure, axes = import_pyplot().subplots(rows, layout="constrained", **options)
    figure.patch.set_alpha(0)
    figure.axes[0].set_title(title, color=TEXT, fontsize=10)
    for each in figure.axes:
        each.patch.set_alpha(0)
        each.tick_params(colors=TEXT, labelsize=8)
        each.grid(color=GRID, linewidth=0.6)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
        each.spines[["left", "bottom"]].set_color(GRID)
    return figure, axes


def _svg(figure: Any, title: str) -> str:
    """The figure as an SVG element without fixed size, colours and ids that another chart of the page could have."""
    text = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser has others
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    import_pyplot().close(figure)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, variable)
    # Each chart has ids such as "axes_1"; only those that are referred to (#…) must stay, and those are hashes.
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    return re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in used else "", svg)
