"""The trainer from Python, as in a notebook.

    from accel_train.api import load_run, train

    result = train({"base": "digits", "epochs": 3})        # the options of a recipe, in a dict
    run = load_run(result)                                 # or the folder of any run
    logits = run.model(run.transform(image)[None])         # of the classes run.classes
    found = run.predict(paths)                             # the most probable classes of image files
    rows = run.rows("eval")                                # for pandas.DataFrame(rows)

Mistakes raise `accel_train.errors.UserError`. Importing this module does not import torch: each function first prepares
the environment, because torch reads some of its variables.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_train.config.options import parse_settings
from accel_train.errors import LOGGER, UserError, print_logged
from accel_train.launch.environment import prepare_environment
from accel_train.user_code import provided, take_objects

if TYPE_CHECKING:
    from accel_train.config.schema import Config
    from accel_train.run.run import TrainingResult
    from accel_train.tools.audit import AuditResult
    from accel_train.tools.evaluate_run import EvaluationResult
    from accel_train.tools.find_lr import LearningRates
    from accel_train.tools.load_run import LoadedRun
    from accel_train.tools.report.preview import PreviewResult
    from accel_train.tools.report.report import ReportResult

__all__ = ["check_data", "evaluate", "export", "find_lr", "load_run", "preview", "report", "train"]


def train(
    recipe: str | Path | Mapping[str, Any],
    *options: str,
    model: Any = None,
    data: Any = None,
    loss: Any = None,
    metrics: Any = None,
    observers: Sequence[object] = (),
    **settings: Any,
) -> TrainingResult:
    """Train, or continue the run in its output directory; return its directory, how it ended, and its metrics.

    `recipe`: a recipe's name or file, or its content as a dict, such as {"base": "digits", "optim": {"lr": 0.1}}; files
    in a dict are relative to the working folder. `settings`: options as keywords, such as epochs=3, optim={"lr": 0.1}.
    `options`: as on the command line, such as "--epochs", "3". Of an option that is given twice the latter counts.

    `model`, `data` and `loss`: a name, as on the command line; a dict of the group's options; or an object. A model is
    an nn.Module, of which a copy is trained, or a function that makes one; the data {"train": Dataset, "test": Dataset}
    or a function that returns that; the loss a function of (logits, targets) to a loss for each sample. To give an
    object and options, write model={"name": net, "image_size": 96}. A run that goes on needs the same objects.

    `metrics`: names, as with --metrics, or {name: function of (logits, targets)}: docs/own.md.
    `observers`: objects that see what happens in the training, and may ask for its end: docs/from_python.md.

    With accelerate's `notebook_launcher(lambda: train(recipe, output_dir="runs/mine"), num_processes=2)` it trains on
    several processes; then nothing may have created an Accelerator before. A training that is asked to stop (by the
    notebook's stop button, or a signal) saves a checkpoint and returns, not `finished`; the same call continues it.
    A signal announces the end of the job: later calls in this process stop after an update, too.

    Raises UnsavedError, a UserError, if the training ended but its checkpoint, weights or result could not be written:
    what is returned has them. A failed save in between is a warning.
    """
    settings = {"model": model, "data": data, "loss": loss, "metrics": metrics, **settings}
    with _configured(recipe, options, settings) as (config, objects):
        if not LOGGER.hasHandlers():
            print_logged()
        launch = prepare_environment(bitwise=config.bitwise)
        from accel_train.train import train as train_config

        return replace(train_config(config, launch, observers=observers), objects=objects)


def load_run(
    run: str | os.PathLike[str], *, checkpoint: str | Path | None = None, trust_code: bool = False, model: Any = None
) -> LoadedRun:
    """Return a run's model with its transform, class names and metrics, and `predict` for image files.

    `checkpoint`: "best", "last", or a checkpoint's folder or name, such as "update-00001234"; default: "last", the
    final weights, or the newest checkpoint of a run that has not finished. `trust_code`: execute the model's code that
    the run keeps. `model`: for a run that was trained with an object, a model like it, which is copied, or a function
    that makes one. The result of `train` has its objects; the path of its folder does not.
    """
    with _objects_of(run, model=model):
        from accel_train.tools.load_run import load

        return load(Path(run), None if checkpoint is None else Path(checkpoint), trust_code=trust_code)


def evaluate(
    run: str | os.PathLike[str],
    *options: str,
    split: str = "test",
    checkpoint: str | Path | None = None,
    keep_predictions: bool = False,
    trust_code: bool = False,
    model: Any = None,
    data: Any = None,
    metrics: Mapping[str, Any] | None = None,
) -> EvaluationResult:
    """Evaluate a run's model on every sample of a split. Collective; unlike the command line it writes no files.

    `options`: other data, as on the command line: "--data.root", "elsewhere". `keep_predictions`: also return the label
    and the logits of each sample, on the main process.
    `model`, `data`, `metrics`: objects, as `train` takes them.
    """
    launch = prepare_environment()
    with _objects_of(run, metrics, model=model, data=data):
        from accel_train.tools.evaluate_run import evaluate_run

        file = None if checkpoint is None else Path(checkpoint)
        settings: dict[str, Any] = {"keep_predictions": keep_predictions, "trust_code": trust_code}
        return evaluate_run(launch, Path(run), split=split, checkpoint=file, overrides=options, **settings)


def export(run: str | os.PathLike[str], format: str, *, model: Any = None, **options: Any) -> Path:
    """Write a run's model as "timm", "onnx" or "pt2"; return the folder.

    `model`, `checkpoint`: as `load_run` has them. For `output`, `weights`, … see tools/export.py.
    """
    launch = prepare_environment()
    with _objects_of(run, model=model):
        from accel_train.tools.export import export as export_run

        return export_run(launch, Path(run), format, **_with_paths(options))


def report(*runs: str | os.PathLike[str], **options: Any) -> ReportResult:
    """Write the page of a run, or of several. For `output`, `checkpoint`, … see report/report.py."""
    launch = prepare_environment()
    with _objects_of(runs[0] if len(runs) == 1 else ""):
        from accel_train.tools.report.report import report as report_runs

        return report_runs(launch, [Path(run) for run in runs], **_with_paths(options))


def check_data(
    data: Any, *, output: str | Path | None = None, json_file: str | Path | None = None, processes: int | None = None
) -> AuditResult:
    """Find what blocks or spoils a training: unreadable images, empty classes, images in two splits or with two labels.

    `data`: as `train` takes it, such as {"name": "folder", "root": "photos"}. For `output`, `json_file` and `processes`
    see audit.py. It writes the list and the JSON file, as the command line does.
    """
    prepare_environment()
    from accel_train.tools.audit import check_data as audit

    places = [None if path is None else Path(path) for path in (output, json_file)]
    with _configured({"data": data}, (), {}) as (config, _):
        return audit(config.data, output=places[0], json_file=places[1], processes=processes)


def preview(
    recipe: str | Path | Mapping[str, Any], *words: str, output: str | Path = "preview.png", images: int = 8
) -> PreviewResult:
    """Write a PNG with the images that the model of a recipe will see: see report/preview.py."""
    launch = prepare_environment()
    from accel_train.tools.report.preview import preview as write_picture

    with _configured(recipe, words, {}) as (config, _):
        return write_picture(launch, config, Path(output), images=images)


def find_lr(recipe: str | Path | Mapping[str, Any], *words: str, **options: Any) -> LearningRates:
    """Train with growing learning rates, and return the losses. For `updates` see tools/find_lr.py; its `plot` draws
    them."""
    launch = prepare_environment()
    from accel_train.tools.find_lr import find_lr as find

    with _configured(recipe, words, {}) as (config, _):
        return find(launch, config, **options)


def _with_paths(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: Path(value) if name in ("output", "checkpoint") and value else value for name, value in options.items()
    }


def _objects_of(run: Any, metrics: Mapping[str, Any] | None = None, **given: Any) -> AbstractContextManager[None]:
    """Until the end, the objects that a TrainingResult was trained with mean what the run's configuration names, or
    those that are `given` (group -> object)."""
    objects = {f"{group}.name": value for group, value in given.items() if value is not None}
    if names := [option for option, value in objects.items() if isinstance(value, str)]:
        raise UserError(f"{names[0].partition('.')[0]}: expected an object, found the name {objects[names[0]]!r}.")
    objects |= {f"metrics:{name}": metric for name, metric in (metrics or {}).items()}
    return provided({**getattr(run, "objects", {}), **objects})


@contextmanager
def _configured(
    recipe: str | Path | Mapping[str, Any], words: Sequence[str], settings: Mapping[str, Any]
) -> Iterator[tuple[Config, dict[str, Any]]]:
    """The configuration of a call, and the objects in it (option -> object), which are known until the end."""
    objects: dict[str, Any] = {}
    if isinstance(recipe, Mapping):
        recipe, objects = take_objects(recipe)
    settings, more = take_objects(settings)
    objects |= more
    with provided(objects):
        config = parse_settings(recipe if isinstance(recipe, Mapping) else str(recipe), words, settings)
        if config.config_only:
            raise UserError("--config-only: an option of the command line; it trains nothing.")
        yield config, objects
