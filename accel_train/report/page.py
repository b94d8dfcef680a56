"""The page of one run: what it shows, in which words."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from accel_train import __version__
from accel_train.analysis.evaluation_tables import FIGURES, NO_FIGURE, images_of_classes, without_images
from accel_train.errors import UserError, one_line
from accel_train.records.cost.ledger import read_starts
from accel_train.records.cost.summary import cost_of, cost_rows
from accel_train.records.metrics import metrics_for
from accel_train.report.charts import Chart, Line, draw, draw_calibration
from accel_train.report.pictures import Picture
from accel_train.report.records import Row, RunRecords, differences_from_recipe

HEAT_MAP = 50  # classes at most; of more, the most confused pairs are listed
PAIRS = 50


def page_of_run(run: RunRecords, evaluation: Row, pictures: Sequence[Picture], notes: Sequence[str]) -> str:
    """The page of one run. `evaluation`: what evaluation-SPLIT.json holds, or {}."""
    records = [evaluation[name] for name in ("model", "ema") if name in evaluation]
    record: Row = records[-1] if records else {}  # the EMA's if there is one
    base, differences = differences_from_recipe(run)
    return render(
        "run.html",
        title=f"{run.config.recipe or run.name}: {run.name}",
        state=state_of(run),
        facts=_facts(run),
        headline=_headline(run, evaluation),
        charts=[draw(chart) for chart in charts_of_run(run) if not chart.is_empty],
        figures=_figures(run, records),
        records=records,
        record=record,
        split=evaluation.get("split", ""),
        confusion=_confusion(record, run.info.classes),
        pairs=_pairs(record, run.info.classes),
        classes=_classes(record, run.info.classes, evaluation.get("split", "")),
        calibration=draw_calibration(record["calibration"]) if record.get("calibration") else "",
        pictures=pictures,
        base=base,
        differences=differences,
        settings=run.settings,
        machine=_machine(run),
        costs=_costs(run),
        notes=notes,
    )


def check_library() -> None:
    """Raise UserError unless Jinja2 is installed."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise UserError("Jinja2 is not installed, so there is no report: pip install 'accel-train[report]'.") from None


def render(template: str, **content: Any) -> str:
    """The page of a template in this folder."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("accel_train.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,  # not the page's own markup
    )
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    page: str = environment.get_template(template).render(version=__version__, now=now, **content)
    return page


def charts_of_run(run: RunRecords) -> list[Chart]:
    """Loss, the main metric, learning rate, speed and waiting for data over the epochs."""
    metric = "map" if run.info.multi_label else "accuracy"
    return [
        Chart("loss", _over_epochs(run, "loss"), events=run.events),
        Chart(metric, _over_epochs(run, metric), percent=True, events=run.events),
        Chart("learning rate", [_over_updates(run, "lr")], events=run.events),
        Chart("images/s", [_over_updates(run, "images_per_second")], events=run.events),
        Chart("share of the time that waits for data", [_over_updates(run, "data_wait_fraction")], percent=True),
    ]


def _over_epochs(run: RunRecords, name: str) -> list[Line]:
    kinds = [("train", "model", 0, False), ("val", "model", 1, False), ("val", "ema", 1, True)]
    kinds += [("test", "model", 2, False), ("test", "ema", 2, True)]
    lines = []
    for split, weights, color, dashed in kinds:
        rows = [row for row in run.evaluations(split, weights) if name in row]
        if rows:
            label = split if weights == "model" else f"{split} (ema)"
            epochs, values = [row["epoch"] for row in rows], [row[name] for row in rows]
            lines.append(Line(label, epochs, values, color, dashed))
    return lines


def _over_updates(run: RunRecords, name: str) -> Line:
    rows = [row for row in run.of_kind("train") if name in row]
    rows = rows[:: max(1, len(rows) // 500)]  # as many points as a chart has pixels
    return Line(name, [row["update"] / run.updates_per_epoch for row in rows], [row[name] for row in rows])


def state_of(run: RunRecords) -> str:
    """How the run ended, or where it is."""
    state = str(run.status.get("state", "unknown"))
    if run.result:
        by = run.result.get("stopped_by", "epochs")
        return "finished" + (f", stopped by {by}" if by != "epochs" else "")
    at = f"epoch {run.status.get('epoch', '?')} of {run.config.epochs}, update {run.status.get('update', '?')}"
    reason = f": {run.status['reason']}" if run.status.get("reason") else ""
    return f"{state} at {at}{reason}"


def _headline(run: RunRecords, evaluation: Row) -> list[tuple[str, str]]:
    """The few figures that the page begins with."""
    tiles: list[tuple[str, str]] = []
    metric = "map" if run.info.multi_label else "accuracy"
    for weights, suffix in (("model", ""), ("ema", " (ema)")):
        if record := evaluation.get(weights):
            interval = ""
            if "accuracy_interval" in record:
                low, high = record["accuracy_interval"]
                interval = f", 95% interval {100 * low:.1f} to {high:.1%}"
            tiles.append(
                (
                    f"{evaluation['split']} {metric}{suffix}{interval}",
                    "NaN" if record[metric] is None else f"{record[metric]:.2%}",
                )
            )
    if not tiles:
        for each in metrics_for(multi_label=run.info.multi_label):
            value = run.result.get(f"test_{each.name}")
            if value is not None and each.headline:
                tiles.append((f"test {each.name}", each.show(value)))
    if run.result.get("images_per_second"):
        tiles.append(("images/s", f"{run.result['images_per_second']:,.0f}"))
    return tiles


def _facts(run: RunRecords) -> list[tuple[str, str]]:
    settings = run.settings
    trained = run.result.get("train_images")
    facts = [
        ("model", str(settings["model.name"])),
        ("data", f"{settings['data.name']}, {len(run.info.classes)} classes"),
        ("input", f"{run.info.image_size} x {run.info.image_size} pixels, {run.info.channels} channels"),
        (
            "optimizer",
            f"{settings['optim.name']}, learning rate {settings['optim.lr']:g}, batch {settings['batch-size']}",
        ),
        ("epochs", str(settings["epochs"])),
        ("seed", str(settings["seed"])),
    ]
    return facts + ([("training images", f"{trained:,}")] if trained else [])


def _figures(run: RunRecords, records: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Each figure with its value for each of the weights."""
    forms = {
        metric.name: (metric.name, metric.form)
        for metric in metrics_for(multi_label=run.info.multi_label)
        if len(run.info.classes) >= metric.fewest_classes
    } | FIGURES
    shown = []
    for key, (title, form) in forms.items():
        values = [record.get(key) for record in records]
        if any(value is not None for value in values):
            shown.append((title, ["" if value is None else format(value, form) for value in values]))
    scaled = [record.get("temperature") or {} for record in records]
    at_bound = any(entry.get("at_bound") for entry in scaled)  # older evaluations do not say so
    for key, title, form in (
        ("value", f"temperature, {'at a bound of the search' if at_bound else 'fitted on val'}", ".3f"),
        ("loss", "loss at this temperature", ".4f"),
        ("calibration_error", "calibration error at this temperature", ".2%"),
    ):
        if any(scaled):
            shown.append((title, [format(entry[key], form) if entry else "" for entry in scaled]))
    return shown


def _confusion(record: Row, classes: Sequence[str]) -> list[Row]:
    """The rows of the heat map: of each true class, the count and the share of each predicted class."""
    confusion = record.get("confusion")
    if not confusion or len(classes) > HEAT_MAP:
        return []
    return [
        {"name": name, "cells": [(count, count / max(1, sum(counts))) for count in counts]}
        for name, counts in zip(classes, confusion, strict=True)
    ]


def _pairs(record: Row, classes: Sequence[str]) -> list[tuple[str, str, int]]:
    """(true class, predicted class, images) of the pairs that are confused most often, if there is no heat map."""
    confusion = record.get("confusion")
    if not confusion or len(classes) <= HEAT_MAP:
        return []
    wrong = [
        (count, true, said)
        for true, counts in enumerate(confusion)
        for said, count in enumerate(counts)
        if count and true != said
    ]
    worst = sorted(wrong, key=lambda entry: (-entry[0], entry[1:]))[:PAIRS]
    return [(classes[true], classes[said], count) for count, true, said in worst]


def _classes(record: Row, classes: Sequence[str], split: str) -> Row:
    """The table of the classes: {"head": […], "rows": [[name, images, figures …]]}, figures as (number, text), and
    "empty", which classes have no image in the `split`."""
    if not record:
        return {}
    images = images_of_classes(record)
    names = {"average precision": "class_average_precision", "precision": "class_precision", "recall": "class_recall",
             "f1": "class_f1"}  # fmt: skip
    columns = {title: record[key] for title, key in names.items() if key in record}
    rows = [
        [
            name,
            images[label],
            *(_cell(values[label]) if images[label] else (-1.0, NO_FIGURE) for values in columns.values()),
        ]
        for label, name in enumerate(classes)
    ]
    return {"head": ["class", "images", *columns], "rows": rows, "empty": without_images(record, classes, split)}


def _cell(value: float | None) -> tuple[float, str]:
    return (-1.0, "") if value is None else (value, f"{value:.1%}")


def _machine(run: RunRecords) -> list[tuple[str, str]]:
    found = run.environment
    packages = found.get("packages") or {}
    devices = found.get("devices") or []
    kinds = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))
    rows = [
        ("processes", str(found.get("world_size", ""))),
        ("devices", kinds),
        ("precision", str(found.get("precision", ""))),
        ("host", str(found.get("host", ""))),
        ("platform", str(found.get("platform", ""))),
        ("cores", str(found.get("cores", ""))),
        ("Python", str(found.get("python", ""))),
        *((str(name), str(version)) for name, version in packages.items()),
        ("CUDA", str(found.get("cuda") or "")),
        ("commit", str(found.get("commit") or "")),
    ]
    return [(name, value) for name, value in rows if value]


def _costs(run: RunRecords) -> list[tuple[str, str]]:
    """What the run cost: of a run of an older version only how many starts it had."""
    if cost := cost_of(read_starts(run.path)):
        rows = cost_rows(cost)
    else:
        rows = [("starts", str(1 + sum(event[0] == "restart" for event in run.events)))]
    counts = {kind: sum(event[0] == kind for event in run.events) for kind in ("rewind", "skipped")}
    return rows + [(f"events: {kind}", str(count)) for kind, count in counts.items() if count]
