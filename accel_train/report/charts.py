"""The charts of a report, as SVG that takes its colours from the page: it follows a light or a dark theme."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from accel_train.errors import one_line
from accel_train.report.plots import import_pyplot

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
    events: list[tuple[str, float, str]] = field(default_factory=list)
    """See `RunRecords.events`."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing but single points to show."""
        return not any(sum(value is not None for value in line.y) > 1 for line in self.lines)


def draw(chart: Chart) -> str:
    """The chart as an SVG element."""
    figure, axes = _axes(chart.title)
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
    for kind, at, _ in chart.events[:200]:
        drawn[kind] = axes.axvline(at, color=MARK, linewidth=0.9, linestyle=STYLES[kind])
    axes.set_xlabel("epoch", color=TEXT)
    axes.xaxis.set_major_locator(_whole_numbers())
    if chart.percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:g}%")
    if len(drawn) > 1:
        legend = axes.legend(drawn.values(), drawn.keys(), frameon=False, labelcolor=TEXT, fontsize=8)
        for label in legend.get_texts():  # the name of a run may have two dollars, and is no formula
            label.set_parse_math(False)
    return _svg(figure, chart.title)


def draw_calibration(diagram: Sequence[dict[str, float]]) -> str:
    """The accuracy of each bin of probabilities beside the probability, from `figures.calibration`."""
    figure, axes = _axes("calibration")
    axes.plot([0, 1], [0, 1], color=MARK, linestyle="--", linewidth=0.9, label="perfect")
    total = sum(entry["count"] for entry in diagram)
    sizes = [12 + 300 * entry["count"] / total for entry in diagram]
    x, y = [entry["confidence"] for entry in diagram], [entry["accuracy"] for entry in diagram]
    axes.plot(x, y, color=SERIES[0], linewidth=1.2)
    axes.scatter(x, y, s=sizes, color=SERIES[0], alpha=0.6, label="images of a bin", linewidths=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value * 100:g}%")
    axes.set_xlim(-0.03, 1.03)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("probability of the predicted class", color=TEXT)
    axes.set_ylabel("accuracy", color=TEXT)
    axes.legend(frameon=False, labelcolor=TEXT, fontsize=8, loc="upper left", markerscale=0.5)
    return _svg(figure, "calibration")


def _whole_numbers() -> Any:
    """Where an axis has its numbers: at whole ones."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=8, integer=True, min_n_ticks=1)


def _axes(title: str) -> tuple[Any, Any]:
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(figsize=(4.4, 2.9), layout="constrained")
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    axes.set_title(title, color=TEXT, fontsize=10)
    axes.tick_params(colors=TEXT, labelsize=8)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)
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
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, variable)
    # Each chart has ids such as "axes_1"; only those that are referred to (#…) must stay, and those are hashes.
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    return re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in used else "", svg)
