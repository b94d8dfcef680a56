"""The few figures that the page begins with."""

from __future__ import annotations

from dataclasses import dataclass

from accel_train.analysis.figures import interval_text
from accel_train.records.metrics import figures_for
from accel_train.report.one_run.words import interval_of, shown_record
from accel_train.report.shared.names import SPLITS, figure_title
from accel_train.report.shared.records import Row, RunRecords


@dataclass(frozen=True)
class Tile:
    """A figure in large letters."""

    value: str
    name: str
    interval: str = ""
    """Its 95 % interval; "" if none is known."""


def headline_of(run: RunRecords, evaluation: Row) -> list[Tile]:
    """The main figure and those of --metrics, of the EMA first if there is one. Without an evaluation that of the
    result, or of the newest epoch."""
    shown: list[tuple[str, Row]] = [(name, evaluation[name]) for name in ("ema", "model") if name in evaluation]
    split = str(evaluation.get("split", ""))
    if not shown:
        split, record, _ = shown_record(run, {})
        shown = [(str(record.get("weights", "model")), record)] if record else []
    tiles = []
    for weights, record in shown:
        suffix = f", {weights}" if len(shown) > 1 or weights == "ema" else ""
        for figure in figures_for(run.config.metrics, multi_label=run.info.multi_label):
            if not (figure.name == run.main_figure or figure.chosen) or figure.name not in record:
                continue
            value = record[figure.name]
            interval = interval_of(record) if figure.name == "accuracy" else None
            tiles.append(
                Tile(
                    "NaN" if value is None else figure.show(value),
                    f"{SPLITS[split]} {figure_title(figure.name)}{suffix}",
                    "" if interval is None else interval_text(*interval),
                )
            )
    return tiles
