"""Several runs beside each other, from their records: settings that differ, metrics, speed.

Runs that differ in their seed alone are the runs of one setting. Over these, mean and standard deviation are taken, and
settings are compared by Welch's t-test (Welch 1947, "The generalization of Student's problem when several different
population variances are involved", Biometrika 34).
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_train.errors import one_line
from accel_train.task import metric_title
from accel_train.tools.evaluate_run import Table
from accel_train.tools.report.curves import Chart, Line, draw, render
from accel_train.tools.report.records import RunRecords, state_of


def compare_runs(runs: Sequence[RunRecords]) -> list[Table]:
    """Return the tables of two runs or more: the runs, the means over seeds, the differences of settings, the speed.

    A table that has nothing to say is left out: differences need two settings with two seeds each.
    """
    tables = [_results(runs), _means(runs), _differences(runs), _speed(runs)]
    return [table for table in tables if table.rows]


def csv_of_runs(runs: Sequence[RunRecords]) -> str:
    """Return a CSV file: a row for each run, with the settings that differ and all numbers of result.json."""
    settings, names = _differing_settings(runs), _names(runs)
    numbers = dict.fromkeys(key for run in runs for key, value in run.result.items() if number(value) is not None)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", *settings, "state", *numbers])
    for run, name in zip(runs, names, strict=True):
        values = [run.settings.get(key) for key in settings]
        writer.writerow([name, *values, state_of(run), *(run.result.get(key, "") for key in numbers)])
    return text.getvalue()


def page_of_runs(runs: Sequence[RunRecords]) -> str:
    """Return the page: the curves of all runs, and the tables."""
    return render(
        "report/several_runs.html",
        title=f"{len(runs)} runs compared",
        charts=[draw(chart) for chart in _curves(runs)],
        tables=compare_runs(runs),
    )


def number(value: Any) -> float | None:
    """A finite number, or None: a damaged record may have anything."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None


def _names(runs: Sequence[RunRecords]) -> list[str]:
    """A name for each run, to show: its folder's, or as much of its path as tells the runs apart."""
    paths = [run.path.resolve() for run in runs]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = [str(Path(*path.parts[-length:])) for path in paths]
        if len({*names}) == len(names):
            return [one_line(name) for name in names]
    return [one_line(f"{place}: {run.name}") for place, run in enumerate(runs, 1)]


def _differing_settings(runs: Sequence[RunRecords]) -> list[str]:
    """The options that have not the same value in all runs."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    return [key for key in keys if any(run.settings.get(key) != runs[0].settings.get(key) for run in runs)]


def _settings(runs: Sequence[RunRecords]) -> dict[str, list[RunRecords]]:
    """The runs of each setting, by what tells it from the others: "optim.lr=0.1"; runs differ in their seed alone."""
    keys = [key for key in _differing_settings(runs) if key != "seed"]
    groups: dict[str, list[RunRecords]] = {}
    for run in runs:
        values = (f"{key}={json.dumps(run.settings.get(key), default=str)}" for key in keys)
        groups.setdefault(" ".join(values) or "all runs", []).append(run)
    return groups


def _metric(run: RunRecords, key: str) -> float | None:
    """A metric of result.json: of the EMA if the run has one."""
    averaged = number(run.result.get(f"ema_{key}"))
    return number(run.result.get(key)) if averaged is None else averaged


def _metrics(runs: Sequence[RunRecords]) -> dict[str, tuple[str, str]]:
    """The metrics that a run has: key of result.json -> title and format; first the one by which runs are judged."""
    metrics = sorted((metric for run in runs for metric in run.metrics), key=lambda metric: not metric.headline)
    main = dict.fromkeys(f"test_{run.info.task.best_metric}" for run in runs)
    known = main | {f"test_{metric.name}": None for metric in metrics} | {"best_val_accuracy": None}
    forms = {f"test_{metric.name}": metric.form for metric in metrics}
    found = [key for key in known if any(_metric(run, key) is not None for run in runs)]
    return {key: (_title(key), forms.get(key, ".2%")) for key in found}


def _title(key: str) -> str:
    return "best validation accuracy" if key == "best_val_accuracy" else f"test {metric_title(key[len('test_') :])}"


def _results(runs: Sequence[RunRecords]) -> Table:
    settings, metrics = _differing_settings(runs), _metrics(runs)
    rows = []
    for run, name in zip(runs, _names(runs), strict=True):
        values = [_metric(run, key) for key in metrics]
        shown = [
            "" if value is None else format(value, form)
            for value, (_, form) in zip(values, metrics.values(), strict=True)
        ]
        rows.append([name, *(_setting(run.settings.get(key)) for key in settings), state_of(run), *shown])
    return Table("runs", ["run", *settings, "state", *(title for title, _ in metrics.values())], rows)


def _setting(value: Any) -> str:
    """A setting as one types it."""
    words = {None: "none", True: "true", False: "false"}
    if isinstance(value, (list, tuple)):
        return " ".join(map(_setting, value))
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _means(runs: Sequence[RunRecords]) -> Table:
    """Mean and standard deviation over the seeds of each setting, if one has several."""
    settings, rows = _settings(runs), []
    for key, (title, form) in _metrics(runs).items():
        for name, group in settings.items():
            values = [value for run in group if (value := _metric(run, key)) is not None]
            if len(values) > 1:
                spread = format(statistics.stdev(values), form)
                rows.append([title, name, str(len(values)), format(statistics.mean(values), form), spread])
    return Table("over seeds", ["metric", "setting", "seeds", "mean", "standard deviation"], rows)


def _differences(runs: Sequence[RunRecords]) -> Table:
    """Each setting with several seeds against the first of them, by the metric by which runs are judged."""
    from scipy.stats import ttest_ind

    rows: list[list[str]] = []
    for key, (title, form) in list(_metrics(runs).items())[:1]:
        samples = {
            name: [value for run in group if (value := _metric(run, key)) is not None]
            for name, group in _settings(runs).items()
        }
        (first, base), *others = [(name, values) for name, values in samples.items() if len(values) > 1] or [("", [])]
        for name, values in others:
            difference = statistics.mean(values) - statistics.mean(base)
            row = [title, name, first, format(difference, f"+{form}")]
            if len({*base}) == len({*values}) == 1:  # no spread to judge by
                rows.append([*row, "", ""])
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # nearly equal values: the p-value says it
                test = ttest_ind(values, base, equal_var=False)
            low, high = test.confidence_interval(0.95)
            rows.append([*row, f"{low:+{form}} to {high:+{form}}", f"{test.pvalue:.2g}"])
    head = ["metric", "setting", "against", "difference", "95 % interval", "p (Welch)"]
    return Table("differences", head, rows)


def _speed(runs: Sequence[RunRecords]) -> Table:
    """Images a second, and how they grow with the number of processes among runs of the same setting."""
    names, rows = dict(zip(map(id, runs), _names(runs), strict=True)), []
    for group in _settings(runs).values():
        known = [
            (run, number(run.result.get("world_size")), number(run.result.get("images_per_second"))) for run in group
        ]
        timed = sorted(
            ((count, speed, run) for run, count, speed in known if count and speed), key=lambda each: each[0]
        )
        for count, speed, run in timed:
            fewest, slowest = timed[0][:2]
            speed_up = ""
            if count != fewest:
                speed_up = f"{speed / slowest:.2f}x ({speed / slowest * fewest / count:.0%})"
            seconds = number(run.result.get("train_seconds"))
            cells = [run.devices, f"{speed:,.0f}", speed_up, "" if seconds is None else f"{seconds:,.0f}"]
            rows.append([names[id(run)], f"{count:.0f}", *cells])
    head = ["run", "processes", "devices", "images/s", "speed-up (efficiency)", "training, s"]
    return Table("speed", head, rows)


def _curves(runs: Sequence[RunRecords]) -> list[Chart]:
    """Loss and main metric over the epochs, on the validation split or else on the test split; a colour a setting."""
    colors = {id(run): color for color, group in enumerate(_settings(runs).values()) for run in group}
    charts = []
    for metric in dict.fromkeys(["loss", *(run.info.task.best_metric for run in runs)]):
        lines = []
        for run, name in zip(runs, _names(runs), strict=True):
            split = "val" if run.evaluations("val", "model") else "test"
            rows = run.evaluations(split, "ema") or run.evaluations(split, "model")
            points = [(number(row.get("epoch")), number(row.get(metric))) for row in rows]
            known = [(x, y) for x, y in points if x is not None and y is not None]
            lines.append(Line(f"{name} ({split})", [x for x, _ in known], [y for _, y in known], colors[id(run)]))
        chart = Chart(metric_title(metric), lines, metric != "loss", legend=len(runs) <= 12)
        if not chart.is_empty:
            charts.append(chart)
    return charts
