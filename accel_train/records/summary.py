"""What a run says of itself: its first lines, model.json, data.json, result.json, the last screen, the next steps."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from accel_train import __version__
from accel_train.checkpoint.state import TrainState
from accel_train.config.compatibility import FORMAT, learning_settings
from accel_train.config.declaration import BEST_METRICS
from accel_train.config.schema import Config, value
from accel_train.data.order import Plan
from accel_train.data.sources.load import resolve_mean_std
from accel_train.data.sources.splits import Splits, count_classes, has_one_size
from accel_train.errors import UserError, counted
from accel_train.launch.accelerator import precision
from accel_train.launch.environment import Launch
from accel_train.launch.process import start_folder
from accel_train.records.cost import Ledger, cost_text
from accel_train.records.metrics import Evaluation
from accel_train.records.model_info import ModelInfo
from accel_train.task import Metric, Task, headlines
from accel_train.user_code import GIVEN, short_name


def describe(
    config: Config,
    plan: Plan,
    accelerator: Accelerator,
    splits: Splits,
    model: nn.Module,
    size: int,
    placement: str,
    loaded: str = "",
) -> list[str]:
    """Return the first lines that a run prints: what is trained, where, and how a batch is divided.

    `size`: height and width of the model's input, in pixels; `placement`: of the training data; `loaded`: the weights
    from which the run begins.
    """
    sizes = {"training": splits.to_train_on, "validation": splits.validation, "test": splits.test}
    images = ", ".join(f"{len(source):,} {name}" for name, source in sizes.items() if source is not None)
    left_out = f", {splits.left_out} unreadable left out" if splits.left_out else ""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    world, updates = counted(plan.processes, "process"), config.stop.updates
    most = "" if updates is None else f", at most {counted(updates, 'update')}"
    data_name = short_name("data.name", config.data.name)
    model_name = short_name("model.name", config.model.name)
    lines = {
        "recipe": f"{config.recipe}, {counted(config.epochs, 'epoch')}{most}",
        "data": f"{data_name}: {images} images of {len(splits.classes)} classes{left_out}",
        "unused": splits.ignored,
        "input": placement,
        "model": f"{model_name} for {size}x{size} pixels, {parameters:,} parameters",
        "weights": loaded,
        "device": f"{world} on {accelerator.device.type}, {precision(accelerator)}",
        "batch": f"{plan.division}; {counted(plan.updates_per_epoch, 'update')} an epoch",
        "run": str(config.output_dir),
    }
    return [f"{name:<8}{text}" for name, text in lines.items() if text]


def data_record(splits: Splits) -> dict[str, Any]:
    """What data.json says of the data: the images of each split and of each class in it, and what is left out."""
    record: dict[str, Any] = {}
    for name, source in (("train", splits.to_train_on), ("val", splits.validation), ("test", splits.test)):
        if source is not None:
            counts = count_classes(source.labels, len(splits.classes))
            record[name] = {"images": len(source), "class_images": counts}
    return record | {"unreadable": splits.left_out, "unused": splits.ignored}


def model_info_of(config: Config, splits: Splits, image_size: int) -> ModelInfo:
    """What model.json says of a model that trains with images of `image_size` x `image_size` pixels of this data."""
    info = ModelInfo(
        splits.classes,
        splits.channels,
        image_size,
        splits.image_size if has_one_size(splits.train) else None,
        *resolve_mean_std(config, splits),
        splits.full_scale,
        config.origin,
        splits.task,
    )
    return info.at_size(config.model.eval_image_size)


def resumed_text(state: TrainState, ledger: Ledger, *, ended: bool) -> str:
    """Where a run goes on, and what it trains again. `ended`: all epochs are trained."""
    place = "with all epochs trained" if ended else f"in epoch {state.epoch + 1}"
    text = f"continuing after update {state.update}, {place}"
    if repeated := ledger.repeated_updates:
        text += f"; at least {repeated} update{'s are' if repeated > 1 else ' is'} trained again"
    return text


def check_best_metric(config: Config, splits: Splits) -> None:
    """Raise UserError if the data does not have the metric, or if an option needs a validation split and has none."""
    for option, setting in (("best-metric", config.best_metric), ("stop.patience-epochs", config.stop.patience_epochs)):
        if setting is not None and splits.validation is None:
            raise UserError(
                f"--{option} {setting}: follows the validation split, but this data has none: set one aside with "
                "--data.val-fraction 0.1, or remove the option."
            )
    names = [metric.name for metric in splits.task.evaluation_metrics(config.metrics)]
    if config.best_metric is not None and config.best_metric not in names:
        usable = ", ".join(name for name in BEST_METRICS if name in names)
        kind = splits.task.kind
        raise UserError(f"--best-metric {config.best_metric}: this data has {kind}; choose one of {usable}.")


def result_of(
    config: Config,
    plan: Plan,
    train_images: int,
    state: TrainState,
    last: dict[str, Evaluation],
    task: Task,
) -> dict[str, Any]:
    """Return the contents of result.json without the times of the last start.

    `last`: the newest evaluations, "test" and "test (ema)" among them.
    """
    test, ema = last.get("test"), last.get("test (ema)")
    metrics = task.evaluation_metrics(config.metrics)
    metric = config.best_metric or task.best_metric
    result: dict[str, Any] = {
        "format": FORMAT,
        "version": __version__,
        "recipe": config.recipe,
        "epochs": plan.epochs_until(state.epoch, state.epoch_samples),
        "updates": state.update,
        "skipped_updates": state.skipped_updates,
        "world_size": plan.processes,
        "division": plan.division,
        "train_images": train_images,
        "test_images": test.count if test else 0,
        **{f"test_{metric.name}": test.metrics[metric.name] if test else None for metric in metrics},
        **{f"ema_test_{metric.name}": ema.metrics[metric.name] if ema else None for metric in metrics},
        "stopped_by": state.stopped_by(config, plan),
        "best_val_accuracy": state.best_value if metric == "accuracy" else None,
        "best_metric": metric,
        "best_value": state.best_value,
        "best_update": state.best_update,
        "images_per_second": state.timed_samples / state.train_seconds if state.timed_samples else None,
        "train_seconds": state.train_seconds,
    }
    if test:
        result |= test.as_record()
    return result | {"settings": learning_settings(config)}


def final_metrics(
    result: Mapping[str, Any],
    state: TrainState,
    last: Mapping[str, Evaluation],
    stopped: str | None,
    run: Path,
    metrics: Sequence[Metric],
) -> dict[str, str]:
    """Return what the final screen shows of a run, by name. `result`: of result.json, with the times; `stopped`: of
    `stopped_text`; `metrics`: of an evaluation."""
    lines = {
        f"{name} {metric}": shown
        for name, evaluation in last.items()
        for metric, shown in headlines(evaluation.metrics, metrics).items()
        if metric != "loss"
    }
    if state.best_value is not None:
        name = str(result["best_metric"])
        shown = headlines({name: state.best_value}, metrics).get(name, f"{state.best_value:.4f}")
        use = "the last weights" if state.best_update == state.update else "to use it, add --checkpoint best"
        lines[f"best val {name}"] = f"{shown} after epoch {state.best_epoch}; {use}"
    if state.timed_samples:
        lines["speed"] = f"{result['images_per_second']:,.0f} images/s, {state.train_seconds:.1f} s of training"
        if (warm_up := result["warm_up_seconds"]) is not None and warm_up > 1:  # compilation, say
            lines["speed"] += f" after {warm_up:.1f} s of the first update"
    lines["time"] = cost_text(result["cost"])
    if state.skipped_updates:
        lines["skipped"] = f"{counted(state.skipped_updates, 'update')} not finite"
    lines["run"] = str(run)
    return lines if stopped is None else lines | {"stopped": stopped}


STOPS = {"updates": "stop.updates", "patience": "stop.patience-epochs", "hours": "stop.hours"}
"""What ends a run before its last epoch, as `stopped_by` in result.json has it, and the option that says so."""


def stopped_text(config: Config, stopped_by: str | None) -> str | None:
    """Why the run has ended before its last epoch, for the user; None if it has not."""
    option = STOPS.get(stopped_by or "")
    return None if option is None else f"by --{option} {value(config, option):g}"


def next_steps(run: Path) -> dict[str, str]:
    """Return commands to try after a run, by what they do."""
    if GIVEN:  # only a program has the objects
        model, data = (f", {name}=…" * (f"{name}.name" in GIVEN) for name in ("model", "data"))
        return {"use it": f"load_run({str(run)!r}{model})", "evaluate": f"evaluate({str(run)!r}{model}{data})"}
    program, folder = typed_program(), shlex.quote(str(run))
    return {
        "evaluate": f"{program} evaluate {folder}",
        "predict": f"{program} predict {folder} IMAGE…",
        "report": f"{program} report {folder}",
        "other recipes": f"{program} recipes",
    }


def typed_program() -> str:
    """Return how to type this program's name: after `make train` it is not on the PATH."""
    if shutil.which("accel-train"):
        return "accel-train"
    if Path(sys.argv[0]).name == "accel-train":
        return shlex.quote(sys.argv[0])
    return f"{shlex.quote(sys.executable)} -m accel_train"


def resume_command(launch: Launch, run: Path) -> str:
    """What a person types to resume the run in the directory `run`: of a launcher or a job script only what follows
    its own words, which no process knows whole."""
    if GIVEN:
        return f"the same call of train, with output_dir={str(run)!r}"
    recipe = shlex.join([f"{run}/config.yaml", "--output-dir", str(run)])
    if launch.launcher == "none" and start_folder() is None:
        return f"{typed_program()} train {recipe}"
    return f"launch or submit it as before, with {recipe}"
