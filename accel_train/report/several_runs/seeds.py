"""The mean and the spread of each figure over the seeds of a setting."""

from __future__ import annotations

from collections.abc import Sequence

from accel_train.report.several_runs.compared import Compared, differing_settings, groups_of, number
from accel_train.report.several_runs.statistics import spread
from accel_train.report.several_runs.words import result_title, setting_text

Table = tuple[list[str], list[list[str]]]


def learned(runs: Sequence[Compared]) -> dict[str, str]:
    """The keys of result.json of which runs that differ in their seed have a mean -> the form of the values."""
    figures = [figure for each in runs for figure in each.run.figures if figure.headline]
    forms = {f"{weights}test_{figure.name}": figure.form for weights in ("", "ema_") for figure in figures}
    return forms | {"best_val_accuracy": ".2%"}


def table_of_seeds(runs: Sequence[Compared]) -> Table:
    """The head and the rows of a table: of each figure and setting the mean, the standard deviation and the 95 %
    interval of the mean (Student's t) over the runs that differ in their seed alone. Empty if no two runs do."""
    groups = groups_of(runs)
    if all(len(group) < 2 for group in groups):
        return [], []
    keys = [key for key in differing_settings(runs) if key != "seed"]
    rows = []
    for figure, form in learned(runs).items():
        for group in groups:
            values = [value for each in group if (value := number(each.run.result.get(figure))) is not None]
            if values:
                setting = [str(group[0].run.settings.get(key)) for key in keys]
                texts = ["" if value is None else format(value, form) for value in spread(values)]
                rows.append([figure, *setting, str(len(values)), *texts])
    return ["figure", *keys, "seeds", "mean", "standard deviation", "95 % from", "to"], rows


def seeds_table(runs: Sequence[Compared]) -> Table:
    """The same for the page, with readable names."""
    head, rows = table_of_seeds(runs)
    known = {"None": setting_text(None), "True": setting_text(True), "False": setting_text(False)}
    shown = [
        [
            result_title(row[0]),
            *(known.get(cell, cell) for cell in row[1:-2]),
            f"{row[-2]} to {row[-1]}" if row[-1] else "",
        ]
        for row in rows
    ]
    return ([*head[:-2], "95% interval of the mean"] if head else []), shown
