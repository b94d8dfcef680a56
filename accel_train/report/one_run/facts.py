"""Lists of facts about a run: what was trained, on which machine, at which cost."""

from __future__ import annotations

from accel_train.records.cost import cost_of, cost_text, read_starts
from accel_train.report.shared.records import RunRecords


def facts_of(run: RunRecords) -> list[tuple[str, str]]:
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


def machine_of(run: RunRecords) -> list[tuple[str, str]]:
    found = run.environment
    packages = found.get("packages") or {}
    rows = [
        ("processes", str(found.get("world_size", ""))),
        ("devices", run.devices),
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


def costs_of(run: RunRecords) -> list[tuple[str, str]]:
    """What the run cost, its speed, and how often it was disturbed."""
    cost = cost_of(read_starts(run.path))
    rows = [("time", cost_text(cost))] if cost else []
    if hours := cost.get("accelerator_hours"):
        rows.append(("accelerator-hours", f"{hours:.3g}"))
    if speed := run.result.get("images_per_second"):
        rows.append(("speed of training", f"{speed:,.0f} images/s"))
    counts = {kind: sum(event[0] == kind for event in run.events) for kind in ("rewind", "skipped")}
    return rows + [(f"events: {kind}", str(count)) for kind, count in counts.items() if count]
