"""The curves of a run, over its epochs."""

from __future__ import annotations

from typing import Any

from accel_train.report.one_run.trends import best_of
from accel_train.report.shared.charts import Chart, Line
from accel_train.report.shared.names import figure_title
from accel_train.report.shared.records import RunRecords


def charts_of_run(run: RunRecords) -> list[Chart]:
    """Loss, the main metric, those of --metrics, learning rate, speed and waiting for data over the epochs."""
    chosen = [figure for figure in run.figures if figure.chosen]
    best = best_of(run)
    marks: dict[str, Any] = {"events": run.events, "best": None if best is None else best.epoch}
    return [
        *_charts_of_loss(run, marks),
        Chart(figure_title(run.main_figure), _over_epochs(run, run.main_figure), percent=True, **marks),
        *(
            Chart(figure_title(figure.name), _over_epochs(run, figure.name), percent="%" in figure.form, **marks)
            for figure in chosen
        ),
        Chart("learning rate", [_over_updates(run, "lr")], events=run.events),
        Chart("images/s", [_over_updates(run, "images_per_second")], events=run.events),
        Chart("share of the time that waits for data", [_over_updates(run, "data_wait_fraction")], percent=True),
    ]


def _charts_of_loss(run: RunRecords, marks: dict[str, Any]) -> list[Chart]:
    """The loss of all splits, or that of training apart, if it is not what evaluation computes."""
    lines, title = _over_epochs(run, "loss"), run.training_loss
    if not title:
        return [Chart("loss", lines, **marks)]
    evaluated = "loss (binary cross-entropy)" if run.info.multi_label else "loss (cross-entropy)"
    training = [line for line in lines if line.label == "train"]
    return [
        Chart(title, training, **marks),
        Chart(evaluated, [line for line in lines if line not in training], **marks),
    ]


KINDS = {  # of evaluations, by what the page calls them: split, weights, colour
    "train": ("train", "model", 0),
    "val": ("val", "model", 1),
    "val (ema)": ("val", "ema", 1),
    "test": ("test", "model", 2),
    "test (ema)": ("test", "ema", 2),
}


def few_epochs(run: RunRecords) -> str:
    """Why the run has no curves over its epochs; "" if it has some."""
    done = len({row["epoch"] for row in run.of_kind("eval") if "epoch" in row})
    if done > 1:
        return ""
    if not done:
        return "No epoch is complete, so there are no curves over the epochs."
    has = "The run has one epoch" if run.config.epochs == 1 else "Only one epoch is complete"
    return f"{has}, so there are no curves over the epochs. Its figures:"


def epoch_table(run: RunRecords) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """What the newest evaluations of training have found: the titles of the figures, and of each split their values.

    A loss of training that is not what evaluation computes has a column of its own."""
    found = {label: run.evaluations(split, weights) for label, (split, weights, _) in KINDS.items()}
    newest = {label: rows[-1] for label, rows in found.items() if rows}
    figures = [figure for figure in run.figures if any(figure.name in row for row in newest.values())]
    table = []
    for name, row in newest.items():
        values = [(figure, row.get(figure.name)) for figure in figures]
        shown = [figure.show(value) if value is not None else "NaN" * (figure.name in row) for figure, value in values]
        table.append((name, shown))
    titles = [figure_title(figure.name) for figure in figures]
    if run.training_loss and "loss" in titles and "train" in newest:
        place = titles.index("loss")
        titles.insert(place, run.training_loss)
        for name, shown in table:
            shown.insert(place + (name == "train"), "")
    return titles, table


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
