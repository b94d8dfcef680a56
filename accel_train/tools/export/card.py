"""The model card of an export, README.md: data, figures, recipe and limits of the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from accel_train.config.compatibility import affects_learning
from accel_train.records.model_info import ModelInfo
from accel_train.tools.export.formats import OPSET
from accel_train.tools.export.preprocess import FILE
from accel_train.tools.figures import interval_of
from accel_train.tools.load_run import LoadedRun
from accel_train.tools.report.records import RunRecords, differences_from_recipe, read_run
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


def model_card(loaded: LoadedRun, format: str, checked: Sequence[str]) -> str:
    """The text of README.md. `checked`: what the comparison found."""
    run, config, info = read_run(loaded.path), loaded.config, loaded.info
    model, data = _public("model.name", config.model.name), _public("data.name", config.data.name)
    tags = ["accel-train", "image-classification", *({format} & {"timm", "onnx"})]
    head = {"pipeline_tag": "image-classification", "tags": tags}
    head |= {"library_name": format} if format in tags else {}
    of_ema = ", the exponential moving average (EMA) of the weights" if loaded.weights.stem == "ema" else ""
    names = ", ".join(info.classes[:SHOWN]) + (" …" if len(info.classes) > SHOWN else "")
    labels = ["- an image may have several labels, or none"] if info.multi_label else []
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=True)}---",
        f"# {model} on {data}",
        f"An image classifier of {len(info.classes)} classes{of_ema}, trained with accel-train.",
        "## Use",
        USE[format],
        f"`{FILE}` says how an image file becomes the input, and what the outputs are called.",
        "## Data",
        "\n".join([_images(run, data), f"- {len(info.classes)} classes: {names}", *labels]),
        "## Figures",
        "\n".join(_figures(run, loaded.weights)),
        "## Recipe",
        "\n".join(_recipe(run)),
        "## Limits",
        "\n".join(_limits(info)),
        "## Checks",
        "The export was loaded again and compared with the trained model:",
        "\n".join(f"- {line}" for line in checked),
    ]
    return "\n\n".join(parts) + "\n"


def _images(run: RunRecords, data: str) -> str:
    counted = {"train on": run.result.get("train_images"), "test on": run.result.get("test_images")}
    counts = [f"{count:,} to {word}" for word, count in counted.items() if count]
    return f"- data set: {data}" + (f", images: {' and '.join(counts)}" if counts else "")


def _figures(run: RunRecords, weights: Path) -> list[str]:
    """Those of the last `accel-train evaluate` of these weights, else those of the run's end."""
    splits = ("test", "val")
    split, record = next(((s, r) for s in splits if (r := _evaluation(run, s, weights))), ("test", None))
    if record is None and weights.parent == run.path:  # not of a checkpoint
        prefix = "ema_test_" if weights.stem == "ema" else "test_"
        record = {key.removeprefix(prefix): value for key, value in run.result.items() if key.startswith(prefix)}
        record["count"] = run.result.get("test_images")
    lines = [
        f"- {metric.name.replace('_', ' ')}: {metric.show(record[metric.name])}"
        for metric in run.figures
        if record and len(run.info.classes) >= metric.fewest_classes and record.get(metric.name) is not None
    ]
    if record is None or not lines:
        return ["No figures: the model has not been evaluated."]
    if (interval := interval_of(record)) is not None:
        lines.append(f"- 95% interval of the accuracy (Wilson): {interval[0]:.1%} to {interval[1]:.1%}")
    count = f", {record['count']} images" if record["count"] else ""
    return [f"On the {split} split{count}:", "", *lines]


def _evaluation(run: RunRecords, split: str, weights: Path) -> dict[str, Any] | None:
    """The figures of `accel-train evaluate`, if they are of the exported weights."""
    try:
        record = read_json_object(run.path / f"evaluation-{split}.json")[weights.stem]
        same = (run.path / record["weights"]).resolve() == weights.resolve()
        return record if same and isinstance(record["count"], int) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _recipe(run: RunRecords) -> list[str]:
    """The most important settings, and the others that decide what is learned and are not those of the recipe."""
    title, changed = differences_from_recipe(run)
    learned = [key for key in changed if key not in PRIVATE and affects_learning(key, run.config.schedule.name)]
    lines = [f"- {key}: {_public(key, run.settings[key])}" for key in dict.fromkeys((*MAIN, *learned))]
    return [*lines, f"- all other settings that decide what is learned are those of {title}"]


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
