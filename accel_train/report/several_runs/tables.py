"""The tables that have the runs beside each other: settings, results, cost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from accel_train.analysis.figures import accuracy_interval
from accel_train.records.cost.ledger import read_starts
from accel_train.records.cost.summary import cost_of, cost_rows, duration
from accel_train.records.metrics import Figure
from accel_train.report.several_runs.compared import Compared, differing_settings, number
from accel_train.report.several_runs.words import percent_between, setting_text
from accel_train.report.shared.names import figure_title
from accel_train.report.shared.records import state_of

MISSING = "\u2013"
Interval = tuple[float, float]


@dataclass(frozen=True)
class Cell:
    """What a table has of one run."""

    text: str
    small: str = ""
    """Beneath it."""
    href: str = ""


Rows = list[tuple[str, list[Cell]]]


def settings_rows(runs: Sequence[Compared]) -> Rows:
    """The options in which the runs differ, with the value of each run."""
    differing = differing_settings(runs)
    return [(key, [Cell(setting_text(value)) for value in values]) for key, values in differing.items()]


def links(runs: Sequence[Compared], output: Path) -> list[Cell]:
    """The names of the runs, with a relative link from `output` to the report of each that has one."""
    here = output.resolve()
    cells = []
    for each in runs:
        page = each.run.path.resolve() / "report.html"
        there = page.is_file() and page != here
        cells.append(Cell(each.name, href=quote(os.fsencode(os.path.relpath(page, here.parent))) if there else ""))
    return cells


def results_rows(runs: Sequence[Compared]) -> Rows:
    """What the runs have come to: the figures of the weights by which they are judged, then those of their ends."""
    rows: Rows = [("state", [Cell(state_of(each.run)) for each in runs])]
    if any(each.has_ema for each in runs):
        rows.append(("weights", [Cell("EMA" if each.has_ema else "model") for each in runs]))
    for main in dict.fromkeys(each.main for each in runs):
        cells = [_main(each) if each.main == main else Cell(MISSING) for each in runs]
        rows.append((f"test {figure_title(main)}", cells))
    for figure in _figures(runs):
        rows.append((f"test {figure_title(figure.name)}", [_figure(each, figure) for each in runs]))
        if figure.name == "loss" and any(each.has_ema for each in runs):
            rows.append(("test loss without the EMA", [_value(each, "test_loss", figure.form) for each in runs]))
    rows.append(("best validation accuracy", [_value(each, "best_val_accuracy", ".2%") for each in runs]))
    rows += [(title, [_value(each, title, ",.0f") for each in runs]) for title in ("epochs", "updates")]
    return [(title, cells) for title, cells in rows if any(cell.text not in ("", MISSING) for cell in cells)]


def interval_of(each: Compared) -> Interval | None:
    """Wilson's 95 % interval of the accuracy of a run on its test images; None of another figure, or of none."""
    if each.run.info.multi_label or each.score is None:
        return None
    images = len(each.answers) if each.answers else number(each.run.result.get("test_images"))
    return accuracy_interval(round(each.score * images), round(images)) if images and 0 <= each.score <= 1 else None


def _main(each: Compared) -> Cell:
    if each.score is None:
        return _missing(each, each.main)
    interval = interval_of(each)
    small = [] if interval is None else [percent_between(*interval)]
    if each.split != "test":
        small.append(f"of {each.split}")
    return Cell(f"{each.score:.2%}", ", ".join(small))


def _figures(runs: Sequence[Compared]) -> list[Figure]:
    """The figures that a run may have, without the main ones and those that mean nothing for so few classes."""
    found: dict[str, Figure] = {}
    for each in runs:
        for figure in each.run.figures:
            if len(each.run.info.classes) >= figure.fewest_classes and figure.name != each.main:
                found.setdefault(figure.name, figure)
    return [*found.values()]


def _figure(each: Compared, figure: Figure) -> Cell:
    value = each.figure(figure.name)
    return _missing(each, figure.name) if value is None else Cell(figure.show(value))


def _missing(each: Compared, name: str) -> Cell:
    """Why a run has no such figure."""
    if each.answers is not None and each.evaluation.get(name, 0) is None:
        return Cell("NaN")
    key = f"test_{name}"
    if each.run.result.get(key, 0) is None or isinstance(each.run.result.get(key), float):
        return Cell("NaN")
    if key in each.run.result:
        return Cell("damaged")
    return Cell(MISSING if each.is_finished else "not finished")


def _value(each: Compared, key: str, form: str) -> Cell:
    value = number(each.run.result.get(key))
    return Cell(MISSING if value is None else format(value, form))


def cost_table(runs: Sequence[Compared]) -> Rows:
    """What the runs cost, beside each other: each row that one of them has."""
    found = []
    for each in runs:
        cost = cost_of(read_starts(each.run.path))
        seconds, speed = (number(each.run.result.get(key)) for key in ("train_seconds", "images_per_second"))
        own = {
            "devices": each.run.devices,
            "processes": setting_text(
                each.run.result.get("world_size") or each.run.environment.get("world_size") or ""
            ),
            "speed": "" if speed is None else f"{speed:,.0f} images/s",
            "training, without the first update": "" if seconds is None else duration(seconds),
        }
        found.append(own | dict(cost_rows(cost) if cost and cost["wall_seconds"] else []))
    titles = dict.fromkeys(title for rows in found for title, text in rows.items() if text)
    return [(title, [Cell(rows.get(title) or MISSING) for rows in found]) for title in titles]
