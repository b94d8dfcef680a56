"""`accel-train export RUN --format timm|onnx|pt2`: the run's model for other programs, with a model card."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from accel_train.errors import LOGGER, UserError, first_of, writing
from accel_train.files import fsync, set_default_permissions
from accel_train.launch.environment import Launch
from accel_train.task import SEVERAL_LABELS
from accel_train.tools.export.compare import check, real_images
from accel_train.tools.export.formats import FILE, FORMATS, OPSET, check_format, rules_of
from accel_train.tools.load_run import LoadedRun, load
from accel_train.tools.report.records import RunRecords, read_run
from accel_train.user_code.reference import short_name


@dataclass(frozen=True)
class ExportResult:
    """An export that gives what the run's model gives."""

    folder: Path
    files: tuple[Path, ...]


def export(
    launch: Launch,
    run: Path,
    format: str,
    *,
    output: Path | None = None,
    checkpoint: Path | None = None,
    weights: str | None = None,
    trust_code: bool = False,
) -> ExportResult:
    """Write the model of the run in the folder `run` as "timm", "onnx" or "pt2", and compare it with the run.

    `output`: a folder; default RUN/export-FORMAT. `checkpoint`: see `find_weights`. `weights`: "model" or "ema";
    default: the EMA if there is one.
    Raises UserError, also if the export does not give what the run's model gives; then nothing has been written.
    """
    launch.check_alone("export")
    shown = output or run / f"export-{format}"
    output = shown.resolve()
    _check_free(output)
    loaded = load(run, checkpoint, weights=weights, trust_code=trust_code)
    check_format(format, loaded.config.model)
    LOGGER.info(loaded.title)

    rules = rules_of(loaded.info, loaded.config.augment)
    with writing("--output", shown, "another folder"):
        output.parent.mkdir(parents=True, exist_ok=True)
        beside = tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.", ignore_cleanup_errors=True)
    with beside as temporary:
        folder, images = Path(temporary, "export"), Path(temporary, "images")
        images.mkdir()
        compared = real_images(loaded, images, trust_code=trust_code)
        with writing("--output", shown, "another folder"):
            folder.mkdir()
            (folder / FILE).write_text(json.dumps(rules, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            write, reload = FORMATS[format]
            write(loaded, rules, folder)
            checked = []
            for line in check(loaded, reload(folder), rules, compared):
                LOGGER.info(line)
                checked.append(line)
            (folder / "README.md").write_text(model_card(loaded, format, checked), encoding="utf-8")
            for path in list(folder.iterdir()):
                set_default_permissions(path)
                fsync(path)
            fsync(folder)
            folder.rename(output)
    return ExportResult(shown, tuple(sorted(shown.iterdir())))


def _check_free(output: Path) -> None:
    """Raise UserError unless `output` does not exist or is an empty folder."""
    if output.exists() and not output.is_dir():
        raise UserError(f"--output: {output} is a file; name a folder.")
    if output.exists() and (there := sorted(path.name for path in output.iterdir())):
        raise UserError(f"--output: {output} is not empty (found {there[0]}); remove it, or name another folder.")


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
    model, data = short_name("model.name", config.model.name), short_name("data.name", config.data.name)
    head = {"pipeline_tag": "image-classification", "tags": ["accel-train", "image-classification"]}
    head |= {} if format == "pt2" else {"library_name": format}  # of the hub's libraries
    of_ema = ", the exponential moving average (EMA) of the weights" if loaded.weights.stem == "ema" else ""
    trained_on = run.result.get("train_images")
    images = f", {trained_on:,} images to train on" if trained_on else ""
    several = ", of which an image may have several, or none" if info.task is SEVERAL_LABELS else ""
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=True)}---",
        f"# {model} on {data}",
        f"An image classifier of {len(info.classes)} classes{of_ema}, trained with accel-train.",
        "## Use",
        USE[format],
        f"`{FILE}` says how an image file becomes the input, and what the outputs are called.",
        "## Data",
        f"- data set: {data}{images}\n- {len(info.classes)} classes{several}: {first_of(info.classes, 50)}",
        "## Metrics",
        "\n".join(_metrics(run, loaded.weights)),
        "## Checks",
        "The export was loaded again and compared with the trained model:",
        "\n".join(f"- {line}" for line in checked),
    ]
    return "\n\n".join(parts) + "\n"


def _metrics(run: RunRecords, weights: Path) -> list[str]:
    """Those of the training's last evaluation of these weights."""
    if weights.parent == run.path:
        split, record = run.newest_evaluation(weights.stem)
        lines = [
            f"- {metric.name.replace('_', ' ')}: {metric.show(record[metric.name])}"
            for metric in run.metrics
            if len(run.info.classes) >= metric.fewest_classes and record.get(metric.name) is not None
        ]
        if lines:
            return [f"On the {split} split, {record['count']:,} images:", "", *lines]
    return ["The training has not evaluated these weights; `accel-train evaluate` does."]
