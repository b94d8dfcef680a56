"""A run's model evaluated on every sample of a split, each counted exactly once, on any number of processes.

The precision is the one given on the launch command, as in training.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.checkpoint.reading import RunWeights, weights_of_run
from accel_train.checkpoint.state_dict import broadcast_weights, named_tensors
from accel_train.config.schema import Config, as_dict
from accel_train.data.loading import create_input_pipeline, evaluation_batch_size
from accel_train.data.order.samplers import EvaluationSampler
from accel_train.data.sources.files.encoded import EncodedImages
from accel_train.data.sources.load import Source, Splits, splits_of
from accel_train.data.sources.splits import unwrap_subset
from accel_train.errors import LOGGER, UserError, counted
from accel_train.evaluate import evaluate
from accel_train.files import atomic_write
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.agreement import broadcast_from_main
from accel_train.launch.environment import Launch
from accel_train.optim.performance import set_defaults, use_fastest_memory_format
from accel_train.records.metrics import Evaluation
from accel_train.records.model_info import ModelInfo, read_model_info
from accel_train.records.own_metrics import OwnMetrics, create_own_metrics
from accel_train.tools.figures import multi_label_figures, single_label_figures
from accel_train.tools.load_run import empty_model, read_config
from accel_train.tools.predictions import Predictions
from accel_train.user_code.reference import CHOSEN_METRICS, given_metrics, short_name


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation has measured."""

    figures: dict[str, Any]
    """As RUN/evaluation-SPLIT.json has them (docs/run_files.md): the same on all processes."""
    multi_label: bool
    """Whether an image may have several labels."""
    chosen: tuple[str, ...] = ()
    """The run's --metrics."""
    predictions: Predictions | None = None
    """The label and the logits of each sample, if they are kept; on the main process only."""

    def __repr__(self) -> str:
        figures = [f"{name}={value:.4f}" for name, value in self.last.items() if isinstance(value, float)]
        name = self.name.replace("-", " ", 2)
        return f"EvaluationResult({name}, {self.last['count']} images, {', '.join(figures[:8])})"

    @property
    def last(self) -> dict[str, Any]:
        """The figures of the EMA if the run has one, else of the model."""
        return dict(self.figures.get("ema") or self.figures["model"])

    def write(self, outputs: Sequence[Path], predictions: Path | None) -> list[Path]:
        """Write the figures as JSON, and the predictions. Warns of the files that cannot be written; returns them."""
        text = json.dumps(self.figures) + "\n"
        writers: dict[Path, Callable[[Path], None]] = {path: lambda path: atomic_write(path, text) for path in outputs}
        if predictions is not None and self.predictions is not None:
            writers[predictions] = self.predictions.save
        failures = []
        for path, write in writers.items():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write(path)
            except OSError as error:
                LOGGER.warning(f"{path} cannot be written ({error.strerror}).")
                failures.append(path)
        return failures

    def keep(self, run: Path, predictions: Path | None) -> list[Path]:
        """Write the figures to the run's evaluation-SPLIT.json, and to a file of its evaluations/ that stays."""
        stays = run / "evaluations" / f"{self.name}-{datetime.now():%Y%m%d-%H%M%S}.json"
        return self.write([self.file(run), stays], predictions)

    @property
    def name(self) -> str:
        """The split."""
        return str(self.figures["split"])

    def file(self, run: Path) -> Path:
        """Where the newest figures of the run are kept."""
        return run / f"evaluation-{self.name}.json"


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

    files = broadcast_from_main(accelerator, look)  # of "model" and, if there is one, "ema"
    splits = _load_data(config, info)
    models = {name: _load(config, info, accelerator, read.get(name)) for name in files}
    _check_fit(splits, info, run)
    source = _source(splits, split, config)
    own = _own_metrics(config, splits, accelerator) if config.metrics else None

    began = datetime.now().astimezone()
    set_defaults(accelerator.device)
    for model in models.values():  # the same architecture, so the same layout
        layout = use_fastest_memory_format(accelerator, model)
    if accelerator.is_main_process:
        world = f"{counted(accelerator.num_processes, 'process')} on {accelerator.device.type}"
        model_name, data_name = short_name("model.name", config.model.name), short_name("data.name", config.data.name)
        LOGGER.info(f"{run}: {model_name} on {data_name} {split}, {len(source):,} images, {world}")

    def evaluated(model: nn.Module) -> Evaluation:
        sampler = EvaluationSampler(len(source), accelerator.num_processes * evaluation_batch_size(config, len(source)))
        pipeline = create_input_pipeline(
            config, splits, source, sampler, accelerator, training=False, size=info.image_size, memory_format=layout
        )
        return evaluate(accelerator, model, pipeline, keep_logits=True, own=own)

    evaluations = {name: evaluated(model) for name, model in models.items()}
    last, chosen = list(evaluations.items())[-1]
    names = {name: str(file.relative_to(run) if file.is_relative_to(run) else file) for name, file in files.items()}
    about = {"split": split, "data": as_dict(config.data), "time": began.isoformat(timespec="seconds")}

    def figures() -> dict[str, Any]:
        records = {name: _record(evaluation, names[name]) for name, evaluation in evaluations.items()}
        found = {**about, "processes": accelerator.num_processes, "classes": splits.classes, **records}
        return dict(json.loads(json.dumps(found)))  # plain lists and numbers, as a file has them

    kept: Predictions | None = None
    if keep_predictions and accelerator.is_main_process:
        kept = Predictions(
            ids=np.arange(len(source)),
            labels=_array(chosen.labels),
            logits=_array(chosen.logits),
            paths=[source.name(id) for id in range(len(source))] if Path(source.name(0)).is_file() else None,
            classes=splits.classes,
            about={"run": str(run), "weights": names[last], "sha256": read[last].sha256, **about},
        )
    found = broadcast_from_main(accelerator, figures)
    if (warning := chosen.warning(split)) is not None and accelerator.is_main_process:
        LOGGER.warning(warning)
    return EvaluationResult(found, splits.multi_label, config.metrics, kept)


def _load(config: Config, info: ModelInfo, accelerator: Accelerator, weights: RunWeights | None) -> nn.Module:
    """The model of the run, with the `weights` that the main process has. Collective."""
    network = empty_model(config.model, info)
    broadcast_from_main(accelerator, lambda: None if weights is None else weights.load_into(network))
    network.to(accelerator.device)
    broadcast_weights(named_tensors(network), None if weights is None else weights.tensors)
    return network.eval()


def _source(splits: Splits, split: str, config: Config) -> Source:
    """The samples of the split. Raises UserError if the data does not have it."""
    sources = {"train": splits.to_train_on, "val": splits.validation, "test": splits.test}
    chosen = sources.get(split)
    if chosen is None:
        known = " and ".join(name for name, source in sources.items() if source is not None)
        raise UserError(f"--split {split}: the dataset '{config.data.name}' has no such split; it has {known}.")
    return chosen


def _own_metrics(config: Config, splits: Splits, accelerator: Accelerator) -> OwnMetrics | None:
    """The metrics of the run. Of those that its training had as objects, only the ones that are given again."""
    usable = [text for text in config.metrics if text in (*given_metrics(), *CHOSEN_METRICS) or ":" in text]
    if (missing := [text for text in config.metrics if text not in usable]) and accelerator.is_main_process:
        LOGGER.warning(f"metrics that were given as objects of Python are left out here: {', '.join(missing)}.")
    return create_own_metrics(usable, accelerator, splits)


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


def _array(values: Tensor | None) -> npt.NDArray[Any]:
    assert values is not None  # the main process has them
    array: npt.NDArray[Any] = values.numpy()
    return array


def _record(evaluation: Evaluation, weights: str) -> dict[str, Any]:
    """Return an evaluation for JSON, which has no NaN: that becomes null."""
    figures = {name: value if math.isfinite(value) else None for name, value in evaluation.figures.items()}
    logits, labels = _array(evaluation.logits), _array(evaluation.labels)
    # NaN or infinity of broken weights. A logit of -infinity is a class that the model excludes.
    if evaluation.broken or not (logits < np.inf).all():
        more: dict[str, Any] = {}
    else:
        more = multi_label_figures(logits, labels) if labels.ndim == 2 else single_label_figures(logits, labels)
    return {"weights": weights, **figures, "count": evaluation.count, **more, **evaluation.as_record()}
