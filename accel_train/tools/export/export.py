"""`accel-train export RUN --format timm|onnx|pt2`: the run's model for other programs, with a model card."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from accel_train.config.compatibility import affects_learning
from accel_train.errors import LOGGER, UserError, writing
from accel_train.files import fsync, set_default_permissions
from accel_train.launch.environment import Launch
from accel_train.records.model_info import ModelInfo
from accel_train.tools.evaluate_run import interval_of
from accel_train.tools.export.compare import check, real_images
from accel_train.tools.export.formats import FILE, FORMATS, OPSET, check_installed, rules_of, timm_architecture
from accel_train.tools.load_run import LoadedRun, load
from accel_train.tools.report.records import RunRecords, differences_from_recipe, read_run
from accel_train.untrusted import read_json_object
from accel_train.user_code.reference import PREFIXES, short_name

FILES = {FILE, "README.md", "model.onnx", "model.onnx.data", "model.pt2", "config.json", "model.safetensors"}
"""All that exports write."""


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
    Raises UserError; then nothing has been written, unless the export is not what the run's model is: it is left in a
    folder whose name ends in -failed.
    """
    launch.check_alone("export")
    check_installed(format)
    shown = output or run / f"export-{format}"
    output = shown.resolve()
    _check_free(output)
    loaded = load(run, checkpoint, weights=weights, trust_code=trust_code)
    if format == "timm":
        timm_architecture(loaded.config.model, loaded.info)
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
            found = check(loaded, reload(folder), rules, compared)
            (folder / "README.md").write_text(model_card(loaded, format, found.lines), encoding="utf-8")
            _put_in_place(folder, output.with_name(f"{output.name}-failed") if found.failures else output)
    for line in found.lines:
        LOGGER.info(line)
    if found.failures:
        raise UserError(f"{'; '.join(found.failures)}. Do not use this export; it is in {shown}-failed.", code=1)
    return ExportResult(shown, tuple(sorted(shown.iterdir())))


def _check_free(output: Path) -> None:
    """Raise UserError unless `output` does not exist, is empty, or holds nothing but an earlier export."""
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"--output: {output} is a file; name a folder.")
    names = {path.name for path in output.iterdir()}
    others = names - FILES or (names if FILE not in names else set())
    if others:
        raise UserError(f"--output: {output} holds other files ({', '.join(sorted(others)[:3])}); name another folder.")


def _put_in_place(folder: Path, output: Path) -> None:
    """Rename the complete `folder`, in a temporary one, to `output`. An earlier export there is removed with that one.

    Raises UserError and OSError.
    """
    _check_free(output)
    for path in list(folder.iterdir()):
        set_default_permissions(path)
        fsync(path)
    fsync(folder)
    earlier = folder.with_name("earlier")
    if output.exists():
        output.rename(earlier)
    try:
        folder.rename(output)
    except OSError:
        with suppress(OSError):
            earlier.rename(output)
        raise


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
        for metric in run.metrics
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
