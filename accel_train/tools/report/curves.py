"""The curves of a run, and how charts and pages are drawn: charts as SVG that follows the page's light or dark theme.

matplotlib is an optional package, imported only when a plot is drawn.
"""

from __future__ import annotations

import io
import os
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from accel_train import __version__
from accel_train.errors import needing, one_line
from accel_train.files import check_writable
from accel_train.task import metric_title
from accel_train.tools.report.records import RunRecords

# matplotlib draws with these placeholders, which are then replaced by the page's CSS variables.
SERIES = [f"#0102{number:02x}" for number in range(8)]
TEXT, GRID, MARK = "#030400", "#030401", "#030402"
VARIABLES = {color: f"var(--series-{number})" for number, color in enumerate(SERIES)} | {
    TEXT: "var(--text)",
    GRID: "var(--grid)",
    MARK: "var(--mark)",
}


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
    best: float | None = None
    """The best epoch, which is marked."""
    legend: bool = True
    """Whether it has a legend, if there are several lines, or a mark."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing but single points to show."""
        return not any(sum(value is not None for value in line.y) > 1 for line in self.lines)


def draw(chart: Chart) -> str:
    """The chart as an SVG element."""
    figure, axes = _figure(chart.title)
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


def _figure(title: str) -> tuple[Any, Any]:
    """A figure and its axes, in the colours of the page and without a frame."""
    figure, axes = import_pyplot().subplots(layout="constrained", figsize=(4.4, 2.9))
    figure.patch.set_alpha(0)
    axes.set_title(title, color=TEXT, fontsize=10)
    axes.patch.set_alpha(0)
    axes.tick_params(colors=TEXT, labelsize=8)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
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


def import_pyplot() -> Any:
    """Return matplotlib's pyplot, set up for SVG files. Raises UserError if matplotlib is not installed."""
    with needing("matplotlib is not installed, so no plot was drawn: pip install 'accel-train[plot]'."):
        import matplotlib
    if not ({"MPLBACKEND", "JPY_PARENT_PID"} & os.environ.keys() or "matplotlib.pyplot" in sys.modules):
        matplotlib.use("svg")  # else a program or a notebook, which draws figures of its own, has chosen
    matplotlib.rcParams["svg.hashsalt"] = "accel_train"  # the same figures give the same file
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: a smaller file, and one can search it
    from matplotlib import pyplot

    return pyplot


def charts_of_run(run: RunRecords) -> list[Chart]:
    """Loss, the main metric, those of --metrics, learning rate, speed and waiting for data over the epochs."""
    chosen = [metric for metric in run.metrics if metric.chosen]
    main = run.info.task.best_metric
    best = best_epoch(run)
    return [
        *_charts_of_loss(run, best),
        Chart(metric_title(main), _over_epochs(run, main), percent=True, best=best),
        *(
            Chart(metric_title(metric.name), _over_epochs(run, metric.name), percent="%" in metric.form, best=best)
            for metric in chosen
        ),
        Chart("learning rate", [_over_updates(run, "lr")]),
        Chart("images/s", [_over_updates(run, "images_per_second")]),
        Chart("share of the time that waits for data", [_over_updates(run, "data_wait_fraction")], percent=True),
    ]


def _charts_of_loss(run: RunRecords, best: float | None) -> list[Chart]:
    """The loss of all splits, or that of training apart, if it is not what evaluation computes."""
    lines, title = _over_epochs(run, "loss"), run.info.task.training_loss(run.config.loss.name)
    if not title:
        return [Chart("loss", lines, best=best)]
    training = [line for line in lines if line.label == "train"]
    return [
        Chart(title, training, best=best),
        Chart(f"loss ({run.info.task.loss_title})", [line for line in lines if line not in training], best=best),
    ]


KINDS = {  # of evaluations, by what the page calls them: split, weights, colour
    "train": ("train", "model", 0),
    "val": ("val", "model", 1),
    "val (ema)": ("val", "ema", 1),
    "test": ("test", "model", 2),
    "test (ema)": ("test", "ema", 2),
}


def _over_epochs(run: RunRecords, name: str) -> list[Line]:
    lines = []
    for label, (split, weights, color) in KINDS.items():
        if rows := [row for row in run.evaluations(split, weights) if name in row]:
            epochs, values = [row["epoch"] for row in rows], [row[name] for row in rows]
            lines.append(Line(label, epochs, values, color, dashed=weights == "ema"))
    return lines


def _over_updates(run: RunRecords, name: str) -> Line:
    rows = [row for row in run.of_kind("train") if name in row]
    rows = rows[:: max(1, len(rows) // 500)]  # as many points as a chart has pixels
    return Line(name, [row["update"] / run.updates_per_epoch for row in rows], [row[name] for row in rows])


def best_epoch(run: RunRecords) -> float | None:
    """The epoch of the validation split's best evaluation, as result.json has it; None for a run that has not ended."""
    best = run.result.get("best_update")
    return next((row["epoch"] for row in run.evaluations("val", "model") if row["update"] == best), None)


def check_page(option: str, path: Path) -> None:
    """Raise UserError if the page `path` that the `option` names cannot be written, or Jinja2 is not installed."""
    with needing("Jinja2 is not installed, so there is no report: pip install 'accel-train[report]'."):
        import jinja2  # noqa: F401
    check_writable(option, path)


def render(template: str, **content: Any) -> str:
    """The page of a template, which is named from accel_train/tools: "report/run.html"."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("accel_train", "tools"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,  # not the page's own markup
    )
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    page: str = environment.get_template(template).render(version=__version__, now=now, **content)
    return page
