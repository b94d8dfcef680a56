"""A run's model evaluated on every sample of a split, each counted exactly once, on any number of processes.

The precision is the one given on the launch command, as in training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from accelerate import Accelerator
from torch import nn

from accel_train.analysis.load_run import empty_model, read_config
from accel_train.analysis.measure import EvaluationResult, Subject, measure
from accel_train.checkpoint.state_dict import broadcast_weights, named_tensors
from accel_train.checkpoint.weights import RunWeights, weights_of_run
from accel_train.config.schema import Config
from accel_train.data.sources.files.encoded import EncodedImages
from accel_train.data.sources.load import Splits, splits_of
from accel_train.data.sources.splits import unwrap_subset
from accel_train.errors import LOGGER, UserError
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.agreement import broadcast_from_main
from accel_train.launch.environment import Launch
from accel_train.records.model_info import ModelInfo, read_model_info
from accel_train.records.own_metrics import OwnMetrics
from accel_train.user_code.reference import CHOSEN_METRICS, given_metrics


def evaluate_run(
    launch: Launch,
    run: Path,
    *,
    split: str = "test",
    checkpoint: Path | None = None,
    overrides: Sequence[str] = (),
    trust_code: bool = False,
    keep_predictions: bool = False,
) -> EvaluationResult:
    """Evaluate the model of the run in the folder `run`, and its EMA if there is one.

    `split`: "train" (without augmentation), "val" or "test". `checkpoint`: see `find_weights`. `overrides`: options
    that replace the run's data settings (--data.KEY VALUE). `trust_code`: see `read_config`. `keep_predictions`:
    return the logits, of the EMA, or of the model if there is none. Collective.
    Raises UserError.
    """
    config, info = _open(run, overrides, trust_code=trust_code)
    accelerator = create_accelerator(launch)
    # The main process's: a run that trains may have deleted them before the others could read them.
    read: dict[str, RunWeights] = {}

    def look() -> dict[str, Path]:
        read.update(weights_of_run(run, checkpoint))
        return {name: weights.file for name, weights in read.items()}

    files = broadcast_from_main(accelerator, look)
    splits = _load_data(config, info)
    names = {name: str(file.relative_to(run) if file.is_relative_to(run) else file) for name, file in files.items()}
    last = list(files)[-1]
    about = {"run": str(run), "weights": names[last]}
    if last in read:
        about["sha256"] = read[last].sha256
    models = {name: _load(config, info, accelerator, read.get(name)) for name in files}
    subject = Subject(config, splits, split, info.image_size, models, names, str(run), about)
    _check_fit(splits, info, run)
    if config.metrics:
        subject = dataclasses.replace(subject, own_metrics=_own_metrics(subject, accelerator))
    return measure(subject, accelerator, keep_predictions=keep_predictions)


def _load(config: Config, info: ModelInfo, accelerator: Accelerator, weights: RunWeights | None) -> nn.Module:
    """The model of the run, with the `weights` that the main process has. Collective."""
    network = empty_model(config.model, info)
    broadcast_from_main(accelerator, lambda: None if weights is None else weights.load_into(network))
    network.to(accelerator.device)
    broadcast_weights(named_tensors(network), None if weights is None else weights.tensors)
    return network.eval()


def _own_metrics(subject: Subject, accelerator: Accelerator) -> OwnMetrics | None:
    """The metrics of the run. Of those that its training had as objects, only the ones that are given again."""
    from accel_train.records.own_metrics import create_own_metrics

    usable = [text for text in subject.config.metrics if text in (*given_metrics(), *CHOSEN_METRICS) or ":" in text]
    if (missing := [text for text in subject.config.metrics if text not in usable]) and accelerator.is_main_process:
        LOGGER.warning(f"metrics that were given as objects of Python are left out here: {', '.join(missing)}.")
    return create_own_metrics(usable, accelerator, subject.splits)


USED = ("model.name", "data.name", "metrics")  # options that may name the user's own code


def _open(run: Path, overrides: Sequence[str], *, trust_code: bool) -> tuple[Config, ModelInfo]:
    """The configuration of the run, with other data if `overrides` say so, and its model's inputs and outputs."""
    info = read_model_info(run)  # of another version: its options may be others, too
    config = read_config(run, uses=USED, trust_code=trust_code, overrides=overrides)
    info = info.at_size(config.model.eval_image_size)
    # Also other data is normalised as the training data was: the model was trained with that mean and std.
    augment = dataclasses.replace(config.augment, mean=info.mean, std=info.std)
    return dataclasses.replace(config, augment=augment), info


def _load_data(config: Config, info: ModelInfo) -> Splits:
    """The data. Image files without a range of their own get that of the model."""
    splits = splits_of(config)
    if info.range is None or splits.value_range is not None:
        return splits
    if not isinstance(unwrap_subset(splits.train)[0], EncodedImages):
        return splits
    return splits_of(dataclasses.replace(config, data=dataclasses.replace(config.data, range=info.range)))


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
