"""The model card of an export, README.md: data, figures, recipe and limits of the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from accel_train.analysis.figures import interval_of
from accel_train.config.compatibility import affects_learning
from accel_train.export.formats import OPSET
from accel_train.export.preprocess import FILE
from accel_train.records.model_info import ModelInfo
from accel_train.report.shared.records import RunRecords, differences_from_recipe, read_run
from accel_train.untrusted import read_json_object
from accel_train.user_code.reference import PREFIXES, short_name

SHOWN = 50  # at most so many names of classes
MAIN = (
    "model.name", "epochs", "batch-size", "optim.name", "optim.lr", "optim.weight-decay", "schedule.name", "loss.name",
    "seed",
)  # fmt: skip
PRIVATE = ("data.root", "model.weights")  # paths on the machine of the training

USE = {
    "timm": """```python
import timm

model = timm.create_model("local-dir:DIR", pretrained=True).eval()  # on the hub: "hf-hub:ORG/NAME"
print(model.pretrained_cfg["label_names"])
```""",
    "onnx": f"`model.onnx` (ONNX, opset {OPSET}) takes `images`, float32 [batch, channels, size, size], and gives "
    "`logits`, float32 [batch, classes]; the batch may have any size.",
    "pt2": """```python
import torch

model = torch.export.load("model.pt2").module()  # float32 [batch, channels, size, size] to logits
```""",
}


def model_card(run: Path, format: str, weights: Path, checked: Sequence[str]) -> str:
    """The text of README.md. `weights`: the file of the model's or the EMA's; `checked`: what the comparison found."""
    records = read_run(run)
    config, info = records.config, records.info
    model, data = _public("model.name", config.model.name), _public("data.name", config.data.name)
    head: dict[str, Any] = {"pipeline_tag": "image-classification", "tags": ["accel-train", "image-classification"]}
    if format in ("timm", "onnx"):
        head["library_name"] = format
        head["tags"] += [format]
    of_ema = ", the exponential moving average (EMA) of the weights" if weights.stem == "ema" else ""
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=True)}---",
        f"# {model} on {data}",
        f"An image classifier of {len(info.classes)} classes{of_ema}, trained with accel-train.",
        "## Use",
        USE[format],
        f"`{FILE}` says how an image file becomes the input, and what the outputs are called.",
        "## Data",
        "\n".join(_data(records, data)),
        "## Figures",
        "\n".join(_figures(records, weights)),
        "## Recipe",
        "\n".join(_recipe(records)),
        "## Limits",
        "\n".join(_limits(info)),
        "## Checks",
        "The export was loaded again and compared with the trained model:",
        "\n".join(f"- {line}" for line in checked),
    ]
    return "\n\n".join(parts) + "\n"


def _data(run: RunRecords, data: str) -> list[str]:
    info = run.info
    names = ", ".join(info.classes[:SHOWN]) + (" …" if len(info.classes) > SHOWN else "")
    counts = [
        f"{run.result[key]:,} to {word}"
        for key, word in (("train_images", "train on"), ("test_images", "test on"))
        if run.result.get(key)
    ]
    lines = [f"- data set: {data}" + (f", images: {' and '.join(counts)}" if counts else "")]
    lines.append(f"- {len(info.classes)} classes: {names}")
    if info.multi_label:
        lines.append("- an image may have several labels, or none")
    return lines


def _figures(run: RunRecords, weights: Path) -> list[str]:
    """A table of the splits that were evaluated with these weights; else the figures of the run's end."""
    records = {split: _evaluation(run.path / f"evaluation-{split}.json", weights) for split in ("test", "val")}
    rows = {split: record for split, record in records.items() if record}
    if not rows and weights.parent == run.path:  # not of a checkpoint
        prefix = "ema_test_" if weights.stem == "ema" else "test_"
        of_test = {key.removeprefix(prefix): value for key, value in run.result.items() if key.startswith(prefix)}
        rows = {"test": of_test | {"count": run.result.get("test_images")}}
    shown = [
        metric
        for metric in run.figures
        if len(run.info.classes) >= metric.fewest_classes
        and all(record.get(metric.name) is not None for record in rows.values())
    ]
    if not rows or not shown:
        return ["No figures: the model has not been evaluated."]
    names = [metric.name.replace("_", " ") for metric in shown]
    lines = ["| split | images | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for split, record in rows.items():
        cells = [metric.show(record[metric.name]) + _interval(metric.name, record) for metric in shown]
        lines.append(f"| {split} | {record['count'] or ''} | " + " | ".join(cells) + " |")
    return [*lines, "", "In brackets: the 95% interval (Wilson)."] if "accuracy" in names else lines


def _interval(metric: str, record: dict[str, Any]) -> str:
    """ " (90.1% to 94.2%)" for the accuracy; else ""."""
    interval = interval_of(record) if metric == "accuracy" else None
    return "" if interval is None else f" ({interval[0]:.1%} to {interval[1]:.1%})"


def _evaluation(path: Path, weights: Path) -> dict[str, Any] | None:
    """The figures of `accel-train evaluate` in a file, if they are of the exported weights."""
    try:
        record = read_json_object(path)[weights.stem]
        same = (path.parent / record["weights"]).resolve() == weights.resolve()
        return record if same and isinstance(record["count"], int) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _recipe(run: RunRecords) -> list[str]:
    """The most important settings, and the others that decide what is learned and are not those of the recipe."""
    lines = [f"- {key}: {_public(key, run.settings[key])}" for key in MAIN]
    title, changed = differences_from_recipe(run)
    others = [
        f"{key} {_public(key, value)}"
        for key, (_, value) in changed.items()
        if key not in (*MAIN, *PRIVATE) and affects_learning(key, run.config.schedule.name)
    ]
    if others:
        lines.append(f"- other settings that differ from {title}: {', '.join(others)}")
    elif title.startswith("the recipe"):
        lines.append(f"- all other settings are those of {title}")
    return lines


def _public(key: str, value: Any) -> Any:
    """A setting without the folders of the machine of the training."""
    if key in PREFIXES:
        name = short_name(key, str(value))
        return f"local-dir:{Path(name).name}" if name.startswith("local-dir:") else name
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _limits(info: ModelInfo) -> list[str]:
    one = "one of its classes" if not info.multi_label else "probabilities of its classes"
    lines = [
        f"- It knows only its classes: an image of anything else gets {one}, too.",
        "- The figures hold for images like those of the training. Measure others first, such as from another camera.",
        f"- It sees {info.image_size} x {info.image_size} pixels of the centre of an image.",
    ]
    if info.range is not None:
        low, high = info.range
        lines.append(
            f"- Images of more than 8 bits were scaled to 8 first: {low:.12g} is 0 (black), {high:.12g} is 255 "
            f"(white). `{FILE}` begins with images of 8 bits."
        )
    if not info.takes_files:
        lines.append(
            "- Its inputs were tensors that the user's own code prepared; image files cannot be prepared alike."
        )
    return lines
