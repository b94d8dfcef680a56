"""`accel-train evaluate RUN`: the metrics of a run's model over every sample of a split, each counted exactly once.

    accel-train evaluate runs/digits/…
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml -m accel_train evaluate runs/digits/…

give the same counts. The precision is the one given on the launch command, as in training.
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_train.analysis.load_run import find_weights, load_model, read_config
from accel_train.config.options import parse
from accel_train.config.schema import as_dict, value
from accel_train.config.semantics import SEMANTICS, check_same_splits
from accel_train.data.loading import create_input_pipeline
from accel_train.data.order.samplers import EvaluationSampler
from accel_train.data.sources.load import Source, Splits, load_splits
from accel_train.errors import UserError
from accel_train.evaluate import evaluate, evaluation_batch_size
from accel_train.files import atomic_write
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.consensus import broadcast_from_main
from accel_train.launch.environment import Launch
from accel_train.optim.performance import set_defaults, use_fastest_memory_format
from accel_train.records.metrics import Evaluation, metrics_for
from accel_train.records.model_info import ModelInfo, read_model_info
from accel_train.records.table import print_table
from accel_train.user_code.reference import short_name

SHOWN = 20  # at most so many classes are printed


def evaluate_run(
    launch: Launch, run: Path, *, split: str, checkpoint: Path | None, overrides: Sequence[str], trust_code: bool
) -> int:
    """Evaluate the model of the run in the folder `run`, and its EMA if there is one. Returns the exit code.

    `split`: "train" (without augmentation), "val" or "test". `checkpoint`: see `find_weights`. `overrides`: options
    that replace the run's data settings (--data.KEY VALUE). `trust_code`: see `read_config`. Prints the metrics and
    writes them to RUN/evaluation-SPLIT.json; the exit code is 1 if that file cannot be written. Raises UserError.
    """
    used = ("model.name", "data.name")
    config = read_config(run, uses=used, trust_code=trust_code, overrides=overrides)
    info = read_model_info(run)
    if info.semantics != SEMANTICS:
        check_same_splits(str(run), info.semantics, as_dict(parse([str(run / "config.yaml")], checks_code=False).data))
    # Also other data is normalised as the training data was: the model was trained with that mean and std.
    augment = dataclasses.replace(config.augment, mean=info.mean, std=info.std)
    config = dataclasses.replace(config, augment=augment)

    accelerator = create_accelerator(launch)
    weights = broadcast_from_main(accelerator, lambda: find_weights(run, checkpoint))
    splits = load_splits(config.data, config.seed, record=run)
    source = _source(splits, split, config.data.name)
    _check_fit(splits, info, run)
    sampler = EvaluationSampler(len(source), launch.world_size * evaluation_batch_size(config))
    set_defaults(accelerator.device)
    models = {name: load_model(config.model, info, file).to(accelerator.device) for name, file in weights.items()}
    for model in models.values():  # the same architecture, so the same layout
        layout = use_fastest_memory_format(accelerator, model)
    size = info.image_size
    pipeline = create_input_pipeline(
        config, splits, source, sampler, accelerator, training=False, size=size, memory_format=layout
    )
    if accelerator.is_main_process:
        processes = f"{launch.world_size} process{'es' * (launch.world_size > 1)} on {accelerator.device.type}"
        model_name, data_name = (short_name(key, value(config, key)) for key in used)
        print(f"{run}: {model_name} on {data_name} {split}, {len(source):,} images, {processes}", flush=True)
    evaluations = {name: evaluate(accelerator, model, pipeline) for name, model in models.items()}
    accelerator.end_training()
    if not accelerator.is_main_process:
        return 0
    names = {name: str(file.relative_to(run) if file.is_relative_to(run) else file) for name, file in weights.items()}
    output = run / f"evaluation-{split}.json"
    record = {
        "split": split,
        "data": as_dict(config.data),
        "processes": launch.world_size,
        "classes": info.classes,
        **{name: _record(evaluation, names[name]) for name, evaluation in evaluations.items()},
    }
    failure = None
    try:
        atomic_write(output, json.dumps(record) + "\n")
    except OSError as error:
        failure = error
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `evaluate … | head` ends quietly; nothing is left to be written
    _print_evaluations(evaluations, names, info.classes)
    if failure is not None:
        print(f"accel-train: warning: {output} cannot be written ({failure.strerror}).", file=sys.stderr)
        return 1
    counts = "" if info.multi_label else " and the confusion counts"
    print(f"\nall classes{counts}: {output}")
    return 0


def _source(splits: Splits, split: str, data: str) -> Source:
    sources = {"train": splits.to_train_on, "val": splits.validation, "test": splits.test}
    chosen = sources.get(split)
    if chosen is None:
        known = " and ".join(name for name, source in sources.items() if source is not None)
        raise UserError(f"--split {split}: the dataset '{data}' has no such split; it has {known}.")
    return chosen


def _check_fit(splits: Splits, info: ModelInfo, run: Path) -> None:
    """Raise UserError unless the data has the model's classes, in the same order, and its number of channels."""
    trained, given = info.classes, splits.classes
    if given != trained:
        difference = f"{len(trained)} there, {len(given)} here"
        if len(given) == len(trained):
            label = next(label for label in range(len(trained)) if given[label] != trained[label])
            difference = f"class {label} is {trained[label]!r} there and {given[label]!r} here"
        raise UserError(
            f"the data does not have the classes that {run} was trained on ({difference}); choose other data with "
            "--data.name or --data.root."
        )
    if splits.multi_label != info.multi_label:
        kinds = {True: "several labels an image", False: "one label an image"}
        raise UserError(
            f"the data has {kinds[splits.multi_label]}, but {run} was trained with {kinds[info.multi_label]}; choose "
            "other data with --data.name or --data.root."
        )
    if splits.channels != info.channels:
        raise UserError(
            f"the images have {splits.channels} channels, but the model of {run} takes {info.channels}: "
            f"give --data.channels {info.channels} if the data can be read that way."
        )


def _print_evaluations(evaluations: dict[str, Evaluation], names: dict[str, str], classes: Sequence[str]) -> None:
    """Print two tables: the metrics of the model and the EMA, and the figures of each class.

    Of more than SHOWN classes only those with the lowest accuracy (or average precision) are printed.
    """
    last = list(evaluations.values())[-1]  # the EMA if there is one
    table = metrics_for(multi_label=last.confusion is None)
    shown = [metric for metric in table if len(classes) >= metric.fewest_classes]
    head = ["weights", *(metric.name for metric in shown)]
    rows = [
        [names[name], *(metric.show(evaluation.figures[metric.name]) for metric in shown)]
        for name, evaluation in evaluations.items()
    ]
    print()
    print_table(head, rows, numbers=head[1:])

    first = next(iter(last.of_classes))  # the figure that decides which classes are shown
    labels = [label for label, value in enumerate(last.of_classes[first]) if value is not None]
    if len(labels) > SHOWN:
        labels = sorted(labels, key=lambda label: last.of_classes[first][label] or 0.0)[:SHOWN]
        print(f"\nthe {SHOWN} classes with the lowest {_words(first)}, of {len(classes)}:")
    else:
        print()
    columns = [(figure, name) for figure in last.of_classes for name in evaluations]
    head = [
        "class",
        "images",
        *(f"{_words(figure)} ({name})" if len(evaluations) > 1 else _words(figure) for figure, name in columns),
    ]
    rows = []
    for label in labels:
        values = (evaluations[name].of_classes[figure][label] for figure, name in columns)
        rows.append([classes[label], str(last.images[label]), *("" if v is None else f"{v:.2%}" for v in values)])
    if last.confusion is not None:
        for label, row in zip(labels, rows, strict=True):
            confused = last.confusion[label]
            other = max((number for number in range(len(classes)) if number != label), key=confused.__getitem__)
            row.append(f"{classes[other]} ({confused[other]})" if confused[other] else "")
    confusion = ["most often confused with"] * (last.confusion is not None)
    print_table([*head, *confusion], rows, numbers=head[1:])


def _words(figure: str) -> str:
    return figure.replace("_", " ")


def _record(evaluation: Evaluation, weights: str) -> dict[str, Any]:
    """Return an evaluation for JSON, which has no NaN: that becomes null."""
    figures = {name: value if math.isfinite(value) else None for name, value in evaluation.figures.items()}
    return {
        "weights": weights,
        **figures,
        "count": evaluation.count,
        **evaluation.as_record(),
    }
