"""Summaries of a run: what is trained, the result, and the commands to try next."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from accel_train import models
from accel_train.checkpoint.train_state import TrainState
from accel_train.config.compatibility import learning_settings
from accel_train.config.schema import Config, to_yaml
from accel_train.config.semantics import SEMANTICS
from accel_train.data.loading import resolve_mean_std
from accel_train.data.order.drawing import create_draws
from accel_train.data.order.plan import Plan, divide_batch
from accel_train.data.order.samplers import TrainingSampler
from accel_train.data.placement import Placement
from accel_train.data.sources.load import load_splits
from accel_train.data.sources.splits import Splits, has_one_size, label_numbers
from accel_train.errors import UserError, one_line
from accel_train.launch.precision import precision, precision_notice
from accel_train.models.batchnorm import has_batchnorm
from accel_train.optim.loss import check_labels
from accel_train.optim.micro_batch import searches
from accel_train.optim.schedule import check_schedule
from accel_train.records.metrics import Evaluation, best_metric, check_best_metric, metrics_for
from accel_train.records.model_info import ModelInfo
from accel_train.user_code.reference import parse_reference, short_name


def describe(
    config: Config,
    plan: Plan,
    accelerator: Accelerator,
    splits: Splits,
    model: nn.Module,
    size: int,
    placement: Placement,
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
    world = f"{plan.processes} process{'es' * (plan.processes > 1)}"
    data_name = short_name("data.name", config.data.name)
    model_name = short_name("model.name", config.model.name)
    lines = {
        "recipe": f"{config.recipe}, {config.epochs} epoch{'s' * (config.epochs > 1)}",
        "data": f"{data_name}: {images} images of {len(splits.classes)} classes{_named(splits)}{left_out}",
        "unused": splits.ignored,
        "drawn": _drawn(config, plan),
        "input": str(placement),
        "model": f"{model_name} for {size}x{size} pixels, {parameters:,} parameters",
        "weights": loaded,
        "device": f"{world} on {accelerator.device.type}, {precision(accelerator)}",
        "batch": f"{plan.division}; {plan.updates_per_epoch} updates an epoch"
        + "; the most images that fit" * searches(config, accelerator),
        "run": str(config.output_dir),
    }
    return [f"{name:<8}{text}" for name, text in lines.items() if text]


DRAWN = {"balanced": "each class equally often", "weights": "samples by the weights of the data"}
"""--data.sampler -> what it draws, in words."""


def _drawn(config: Config, plan: Plan) -> str:
    """Return what an epoch's samples are if it does not have each of them once; "" if it has."""
    if config.data.sampler == "shuffle":
        return ""
    how_often = "an epoch may have an image more than once, or not at all"
    return f"{plan.samples_per_epoch:,} an epoch, {DRAWN[config.data.sampler]}: {how_often}"


def _named(splits: Splits) -> str:
    """Return the class names of image files if they are few: they show whether it is the intended folder."""
    named = ", ".join(splits.classes)
    return f" ({named})" if not splits.train.in_memory and len(splits.classes) <= 10 and len(named) <= 80 else ""


def _divide_without_data(config: Config, accelerator: Accelerator) -> tuple[int, int]:
    """The same as `divide_batch`, for --config-only: the model is made without memory and arithmetic."""
    size = models.input_size(config.model, None, config.origin)
    # A user's own code may need real numbers.
    with torch.device("cpu" if parse_reference("model.name", config.model.name) else "meta"):
        model = models.create_model(
            config.model, num_classes=2, channels=3, image_size=size, published=False, origin=config.origin
        )
    synchronized = config.model.sync_batchnorm and accelerator.device.type == "cuda"
    return divide_batch(config, accelerator.num_processes, batchnorm=has_batchnorm(model) and not synchronized)


def plan_text(config: Config, accelerator: Accelerator) -> str:
    """Return what --config-only prints: the resolved configuration, and as comments what follows from it.

    Nothing is downloaded; if the data is missing, the number of updates is unknown. Raises UserError if the schedule
    does not fit the data.
    """
    processes, notice = accelerator.num_processes, precision_notice(accelerator)
    virtual_batch, accumulation = _divide_without_data(config, accelerator)
    division = Plan(config.batch_size, config.batch_size, processes, accumulation, virtual_batch=virtual_batch)
    found = "found at the start, as many samples as fit" * searches(config, accelerator)
    lines = [
        f"# processes: {processes}",
        f"# precision: {precision(accelerator)}" + (f" ({notice})" if notice else ""),
        f"# accumulation: {found or accumulation}",
        f"# samples of a process in one forward pass: {found or division.micro_batch}",
        f"# samples of a virtual batch: {virtual_batch}",
        *[f"# shares: {division.division}"] * (division.empty > 0),
    ]
    try:
        splits = load_splits(config.data, config.seed, download=False)
        plan = Plan(len(splits.train), config.batch_size, processes, accumulation, config.data.drop_last, virtual_batch)
        draws = create_draws(config, splits.train.labels, splits.train_weights, splits.unreadable)
        order = TrainingSampler(plan, config.seed, splits.unreadable, draws)
    except UserError as error:
        lines.append(f"# updates: not known ({error})")
    else:
        check_schedule(config.schedule, splits)
        check_best_metric(config, splits)
        check_labels(config.loss, splits.train.labels)
        last = (plan.updates_per_epoch - 1) * plan.batch_size
        lines += [
            f"# training samples: {len(splits.to_train_on)}",
            *([f"# drawn: {drawn}"] if (drawn := _drawn(config, plan)) else []),
            f"# updates an epoch: {plan.updates_per_epoch}",
            f"# samples of an epoch's last update: {order.real_samples(last)}",
            f"# updates in all: {plan.updates_per_epoch * config.epochs}",
        ]
    return to_yaml(config) + "\n".join(map(one_line, lines))


def model_info_of(config: Config, splits: Splits, image_size: int) -> ModelInfo:
    """What model.json says of a model that takes images of `image_size` x `image_size` pixels of this data."""
    return ModelInfo(
        splits.classes,
        splits.channels,
        image_size,
        splits.image_size if has_one_size(splits.train) else None,
        *resolve_mean_std(config, splits),
        splits.full_scale,
        SEMANTICS,
        config.origin,
        splits.multi_label,
        splits.value_range,
    )


def result_of(
    config: Config,
    plan: Plan,
    train_images: int,
    state: TrainState,
    last: dict[str, Evaluation],
    *,
    multi_label: bool = False,
) -> dict[str, Any]:
    """Return the contents of result.json without the times of the last start.

    `last`: the newest evaluations, "test" and "test (ema)" among them.
    """
    test, ema = last.get("test"), last.get("test (ema)")
    metrics, metric = metrics_for(multi_label=multi_label), best_metric(config, multi_label=multi_label)
    result: dict[str, Any] = {
        "recipe": config.recipe,
        "epochs": state.epoch,
        "updates": state.update,
        "left_out_updates": len(state.left_out),
        "world_size": plan.processes,
        "train_images": train_images,
        "test_images": test.count if test else 0,
        **{f"test_{metric.name}": test.figures[metric.name] if test else None for metric in metrics},
        **{
            f"ema_test_{metric.name}": ema.figures[metric.name] if ema else None
            for metric in metrics
            if metric.headline
        },
        "stopped_by": state.stopped_by(config),
        "best_val_accuracy": state.best_figure if metric == "accuracy" else None,
        "best_metric": metric,
        "best_value": state.best_figure,
        "best_update": state.best_update,
        "images_per_second": state.timed_samples / state.train_seconds if state.timed_samples else None,
        "train_seconds": state.train_seconds,
    }
    if test:
        result |= test.as_record()
    return result | {"settings": learning_settings(config)}


def stopped_text(config: Config, state: TrainState, *, multi_label: bool) -> str | None:
    """Why the run has ended before its last epoch, for the user; None if it has not."""
    stop, reason = config.stop, state.stopped_by(config)
    if reason == "hours":
        return f"by --stop.hours {stop.hours:g}, after {state.wall_seconds / 3600:.2g} hours"
    if reason != "patience":
        return None
    metric = best_metric(config, multi_label=multi_label)
    best = "none" if state.best_figure is None else f"{state.best_figure:.4f} after update {state.best_update}"
    epochs = f"{stop.patience_epochs} epochs" if stop.patience_epochs != 1 else "an epoch"
    return f"by --stop.patience-epochs, after {epochs} without a better val {metric} (best: {best})"


def next_steps(run: Path, image: Path | None) -> dict[str, str]:
    """Return commands to try after a run, by what they do. `image`: a file to try the model on."""
    program, folder = typed_program(), shlex.quote(str(run))
    return {
        "evaluate": f"{program} evaluate {folder}",
        "predict": f"{program} predict {folder} {shlex.quote(str(image)) if image else 'IMAGE…'}",
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


FOLDER, COUNT = "examples", 5  # where example images are written, and how many


def example_image(splits: Splits, run: Path) -> Path | None:
    """Return the path of an image that the model was not trained on, or None.

    If the data is not in image files, its first test images are written to RUN/examples, with their class in the name:
    test-0-is-cat.png.
    """
    source = splits.test or splits.validation
    if source is None:
        return None
    if (file := Path(source.name(0))).is_file():
        return file
    from PIL import Image

    split = "test" if splits.test else "validation"
    written: list[Path] = []
    try:
        (run / FOLDER).mkdir(exist_ok=True)
        for id in range(min(COUNT, len(source))):
            names = [splits.classes[label] for label in label_numbers(source.labels[id])] or ["nothing"]
            name = re.sub(r"[^\w.-]+", "_", "-".join(names))
            path = run / FOLDER / f"{split}-{id}-is-{name[:100]}.png"
            pixels = torch.as_tensor(source.fetch([id])[0]).cpu().permute(1, 2, 0)
            Image.fromarray(pixels.squeeze(-1).contiguous().numpy()).save(path)
            written.append(path)
    except (OSError, UserError):  # a full disk or an unreadable image: examples are not essential
        pass
    return written[0] if written else None
