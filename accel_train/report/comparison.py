"""The page that compares several runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from accel_train.records.metrics import METRICS, MULTI_LABEL_METRICS
from accel_train.report.charts import Chart, Line, draw
from accel_train.report.page import render, state_of
from accel_train.report.records import Row, RunRecords, differing_settings, same_but_for_seed


def page_of_runs(runs: list[RunRecords], notes: Sequence[str]) -> str:
    """The page that compares several runs."""
    names = _names(runs)
    return render(
        "runs.html",
        title=f"{len(runs)} runs",
        runs=runs,
        names=names,
        charts=[draw(chart) for chart in charts_of_runs(runs, names) if not chart.is_empty],
        differing=differing_settings(runs),
        results=_results(runs),
        seeds=_seeds(runs, names),
        states=[state_of(run) for run in runs],
        notes=notes,
    )


def charts_of_runs(runs: Sequence[RunRecords], names: Sequence[str]) -> list[Chart]:
    """The loss and the main metric of all runs over each other: of training, and of the split that they were judged
    by."""
    metric = "map" if all(run.info.multi_label for run in runs) else "accuracy"
    charts = []
    for split in ("train", "val", "test"):
        for name, percent in (("loss", False), (metric, True)):
            lines = []
            for number, (run, title) in enumerate(zip(runs, names, strict=True)):
                rows = [row for row in run.evaluations(split, "model") if name in row]
                lines.append(Line(title, [row["epoch"] for row in rows], [row[name] for row in rows], number))
            charts.append(Chart(f"{split} {name}", lines, percent=percent))
    return charts


def _names(runs: Sequence[RunRecords]) -> list[str]:
    """A name for each run: its folder's, or as much of its path as tells the runs apart."""
    paths = [run.path.resolve() for run in runs]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = [str(Path(*path.parts[-length:])) for path in paths]
        if len({*names}) == len(names):
            return names
    return [f"{number}: {run.name}" for number, run in enumerate(runs, 1)]


LEARNED = {
    f"{weights}test_{metric.name}": metric.form
    for weights in ("", "ema_")
    for metric in METRICS + MULTI_LABEL_METRICS
    if metric.headline
} | {"best_val_accuracy": ".2%"}
"""The keys of result.json of which runs that differ in their seed have a mean -> the form of the values."""
HOW = ["best_value", "stopped_by", "epochs", "updates", "world_size", "images_per_second", "train_seconds"]


def _results(runs: Sequence[RunRecords]) -> dict[str, list[str]]:
    found = {key: [run.result.get(key) for run in runs] for key in (*LEARNED, *HOW)}
    return {
        key: [_shown(key, value) for value in values]
        for key, values in found.items()
        if any(value is not None for value in values)
    }


def _shown(key: str, value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return format(value, LEARNED.get(key, ",.6g"))


def _seeds(runs: list[RunRecords], names: Sequence[str]) -> list[Row]:
    """Of each group of runs that differ in their seed alone: mean and standard deviation of the results."""
    groups = []
    for group in same_but_for_seed(runs):
        rows = {}
        for key in LEARNED:
            values = [run.result[key] for run in group if run.result.get(key) is not None]
            if len(values) > 1:
                rows[key] = f"{_shown(key, statistics.mean(values))} ± {_shown(key, statistics.stdev(values))}"
        members = [names[runs.index(run)] for run in group]
        groups.append({"runs": members, "seeds": [run.config.seed for run in group], "rows": rows})
    return groups
