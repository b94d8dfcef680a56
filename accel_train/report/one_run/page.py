"""The page of one run: what it shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accel_train.report.one_run.augmented import Augmented
from accel_train.report.one_run.curves import charts_of_run, epoch_table, few_epochs
from accel_train.report.one_run.facts import costs_of, facts_of, machine_of
from accel_train.report.one_run.pictures import Picture
from accel_train.report.one_run.tables import (
    class_table,
    confused_pairs,
    confusion_table,
    figure_table,
    headline_of,
)
from accel_train.report.one_run.words import words_of
from accel_train.report.shared.charts import draw, draw_calibration
from accel_train.report.shared.records import Row, RunRecords, differences_from_recipe, state_of
from accel_train.report.shared.render import render


@dataclass(frozen=True)
class Pictures:
    """The images of a page; empty without the data."""

    worst: Sequence[Picture] = ()
    right: Sequence[Picture] = ()
    augmented: Sequence[Augmented] = ()


def page_of_run(run: RunRecords, evaluation: Row, pictures: Pictures, notes: Sequence[str]) -> str:
    """The page of one run. `evaluation`: what evaluation-SPLIT.json holds, or {}."""
    records = [evaluation[name] for name in ("model", "ema") if name in evaluation]
    record: Row = records[-1] if records else {}  # the EMA's if there is one
    base, differences = differences_from_recipe(run)
    return render(
        "report/one_run/run.html",
        title=f"{run.config.recipe or run.name}: {run.name}",
        state=state_of(run),
        words=words_of(run, evaluation),
        facts=facts_of(run),
        headline=headline_of(run, evaluation),
        few_epochs=few_epochs(run),
        epoch_table=epoch_table(run),
        charts=[draw(chart) for chart in charts_of_run(run) if not chart.is_empty],
        has_events=bool(run.events),
        figures=figure_table(run, records),
        records=records,
        record=record,
        split=evaluation.get("split", ""),
        confusion=confusion_table(record, run.info.classes),
        pairs=confused_pairs(record, run.info.classes),
        classes=class_table(run, record, evaluation.get("split", "")),
        calibration=draw_calibration(record["calibration"]) if record.get("calibration") else "",
        pictures=pictures,
        base=base,
        differences=differences,
        settings=run.settings,
        machine=machine_of(run),
        costs=costs_of(run),
        notes=notes,
    )
