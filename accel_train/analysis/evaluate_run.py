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
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from accel_train.analysis.evaluation_tables import print_classes, print_figures
from accel_train.analysis.figures import (
    calibration,
    fit_temperature,
    multi_label_figures,
    negative_log_likelihood,
    single_label_figures,
    softmax,
)
from accel_train.analysis.load_run import find_weights, load_model, read_config
from accel_train.analysis.predictions import Predictions, check_can_write
from accel_train.config.options import parse
from accel_train.config.schema import Config, as_dict, value
from accel_train.config.semantics import SEMANTICS, check_same_splits
from accel_train.data.loading import create_input_pipeline
from accel_train.data.order.samplers import EvaluationSampler
from accel_train.data.sources.load import Source, Splits, load_splits
from accel_train.errors import UserError
from accel_train.evaluate import evaluate, evaluation_batch_size
from accel_train.files import atomic_write, sha256
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.consensus import broadcast_from_main
from accel_train.launch.environment import Launch
from accel_train.optim.performance import set_defaults, use_fastest_memory_format
from accel_train.records.metrics import Evaluation
from accel_train.records.model_info import ModelInfo, read_model_info
from accel_train.user_code.reference import short_name


def evaluate_run(
    launch: Launch,
    run: Path,
    *,
    split: str,
    checkpoint: Path | None,
    overrides: Sequence[str],
    trust_code: bool,
    predictions: Path | None = None,
) -> int:
    """Evaluate the model of the run in the folder `run`, and its EMA if there is one. Returns the exit code.

    `split`: "train" (without augmentation), "val" or "test". `checkpoint`: see `find_weights`. `overrides`: options
    that replace the run's data settings (--data.KEY VALUE). `trust_code`: see `read_config`. `predictions`: a file for
    the logits of the EMA, or of the model if there is none; see `Predictions`. Prints the figures and writes them to
    RUN/evaluation-SPLIT.json, and to a file of RUN/evaluations that stays; the exit code is 1 if a file cannot be
    written. Raises UserError.
    """
    began = datetime.now().astimezone()
    config, info = _open(run, overrides, trust_code=trust_code)
    accelerator = create_accelerator(launch)
    if predictions is not None:
        broadcast_from_main(accelerator, lambda: check_can_write(predictions))
    weights = broadcast_from_main(accelerator, lambda: find_weights(run, checkpoint))
    splits = load_splits(config.data, config.seed, record=run)
    source = _source(splits, split, config.data.name)
    _check_fit(splits, info, run)
    set_defaults(accelerator.device)
    models = {name: load_model(config.model, info, file).to(accelerator.device) for name, file in weights.items()}
    for model in models.values():  # the same architecture, so the same layout
        layout = use_fastest_memory_format(accelerator, model)

    def measure(model: nn.Module, samples: Source) -> Evaluation:
        sampler = EvaluationSampler(len(samples), launch.world_size * evaluation_batch_size(config))
        pipeline = create_input_pipeline(
            config, splits, samples, sampler, accelerator, training=False, size=info.image_size, memory_format=layout
        )
        return evaluate(accelerator, model, pipeline, keep_logits=True)

    if accelerator.is_main_process:
        processes = f"{launch.world_size} process{'es' * (launch.world_size > 1)} on {accelerator.device.type}"
        model_name, data_name = (short_name(key, value(config, key)) for key in USED)
        print(f"{run}: {model_name} on {data_name} {split}, {len(source):,} images, {processes}", flush=True)
    evaluations = {name: measure(model, source) for name, model in models.items()}
    last = list(models)[-1]  # the EMA if there is one
    # A temperature must be fitted on other images than those that it is measured on.
    fits = split == "test" and splits.validation is not None and not splits.multi_label
    fitted = measure(models[last], splits.validation) if fits and splits.validation else None
    accelerator.end_training()
    if not accelerator.is_main_process:
        return 0
    names = {name: str(file.relative_to(run) if file.is_relative_to(run) else file) for name, file in weights.items()}
    records = {name: _record(evaluation, names[name]) for name, evaluation in evaluations.items()}
    if fitted is not None:
        records[last]["temperature"] = _temperature(fitted, evaluations[last])
    about = {"split": split, "data": as_dict(config.data), "time": began.isoformat(timespec="seconds")}
    kept = Predictions(
        ids=np.arange(len(source)),
        labels=_array(evaluations[last].labels),
        logits=_array(evaluations[last].logits),
        paths=[source.name(id) for id in range(len(source))] if Path(source.name(0)).is_file() else None,
        classes=info.classes,
        about={"run": str(run), "weights": names[last], "sha256": sha256(weights[last]), **about},
    )
    record = {**about, "processes": launch.world_size, "classes": info.classes, **records}
    output = run / f"evaluation-{split}.json"
    failures = _write(record, output, run / "evaluations" / f"{split}-{began:%Y%m%d-%H%M%S}.json", kept, predictions)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `evaluate … | head` ends quietly; nothing is left to be written
    print_figures(records, info.classes, multi_label=info.multi_label)
    print_classes(records[last], info.classes)
    print()
    if predictions is not None and predictions not in failures:
        print(f"the logits of {names[last]}: {predictions}")
    if output not in failures:
        print(f"all classes{'' if info.multi_label else ' and the confusion counts'}: {output}")
    return 1 if failures else 0


def _array(values: Tensor | None) -> npt.NDArray[Any]:
    assert values is not None  # the main process has them
    array: npt.NDArray[Any] = values.numpy()
    return array


def _write(
    record: dict[str, Any], newest: Path, stays: Path, kept: Predictions, predictions: Path | None
) -> list[Path]:
    """Write the record to `newest` and `stays`, and the predictions. Warns of those that cannot be written, and returns
    them."""
    text = json.dumps(record) + "\n"
    writers: dict[Path, Callable[[Path], None]] = {
        path: lambda path: atomic_write(path, text) for path in (newest, stays)
    }
    if predictions is not None:
        writers[predictions] = kept.save
    failures = []
    for path, write in writers.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
        except OSError as error:
            print(f"accel-train: warning: {path} cannot be written ({error.strerror}).", file=sys.stderr)
            failures.append(path)
    return failures


def _temperature(fitted: Evaluation, tested: Evaluation) -> dict[str, Any]:
    """The temperature that suits the validation split, and what it makes of the tested one."""
    value = fit_temperature(_array(fitted.logits), _array(fitted.labels))
    logits, labels = _array(tested.logits), _array(tested.labels)
    return {
        "value": value,
        "split": "val",
        "loss": negative_log_likelihood(logits, labels, value),
        "calibration_error": calibration(softmax(logits, value), labels)[0],
    }


USED = ("model.name", "data.name")  # options that may name the user's own code


def _open(run: Path, overrides: Sequence[str], *, trust_code: bool) -> tuple[Config, ModelInfo]:
    """The configuration of the run, with other data if `overrides` say so, and its model's inputs and outputs."""
    config = read_config(run, uses=USED, trust_code=trust_code, overrides=overrides)
    info = read_model_info(run)
    if info.semantics != SEMANTICS:
        check_same_splits(str(run), info.semantics, as_dict(parse([str(run / "config.yaml")], checks_code=False).data))
    # Also other data is normalised as the training data was: the model was trained with that mean and std.
    augment = dataclasses.replace(config.augment, mean=info.mean, std=info.std)
    return dataclasses.replace(config, augment=augment), info


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


def _record(evaluation: Evaluation, weights: str) -> dict[str, Any]:
    """Return an evaluation for JSON, which has no NaN: that becomes null."""
    figures = {name: value if math.isfinite(value) else None for name, value in evaluation.figures.items()}
    logits, labels = _array(evaluation.logits), _array(evaluation.labels)
    if not np.isfinite(logits).all():  # of broken weights; scikit-learn would refuse them
        more: dict[str, Any] = {}
    else:
        more = multi_label_figures(logits, labels) if labels.ndim == 2 else single_label_figures(logits, labels)
    return {"weights": weights, **figures, "count": evaluation.count, **more, **evaluation.as_record()}
