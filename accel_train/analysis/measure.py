"""The common part of all evaluations: measure the models on a split."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.analysis.figures import multi_label_figures, single_label_figures
from accel_train.analysis.predictions import Predictions
from accel_train.config.schema import Config, as_dict
from accel_train.data.loading import create_input_pipeline, evaluation_batch_size
from accel_train.data.order.samplers import EvaluationSampler
from accel_train.data.sources.load import Source, Splits
from accel_train.errors import LOGGER, UserError, counted
from accel_train.evaluate import evaluate
from accel_train.files import atomic_write
from accel_train.launch.agreement import broadcast_from_main
from accel_train.optim.performance import set_defaults, use_fastest_memory_format
from accel_train.records.metrics import Evaluation
from accel_train.records.own_metrics import OwnMetrics
from accel_train.user_code.reference import short_name


@dataclass(frozen=True)
class Subject:
    """What is evaluated: models of one architecture, which take `size` pixels, on a split of data."""

    config: Config
    splits: Splits
    split: str
    size: int
    models: Mapping[str, nn.Module]
    """"model" and, if there is one, "ema"."""
    names: Mapping[str, str]
    """How the weights of each are called."""
    title: str
    about: Mapping[str, Any]
    """For `Predictions.about`."""
    own_metrics: OwnMetrics | None = None

    @property
    def last(self) -> str:
        """Whose predictions are kept: the EMA's if there is one."""
        return list(self.models)[-1]

    @property
    def source(self) -> Source:
        """The samples of the split. Raises UserError if the data does not have it."""
        sources = {"train": self.splits.to_train_on, "val": self.splits.validation, "test": self.splits.test}
        chosen = sources.get(self.split)
        if chosen is None:
            known = " and ".join(name for name, source in sources.items() if source is not None)
            data = self.config.data.name
            raise UserError(f"--split {self.split}: the dataset '{data}' has no such split; it has {known}.")
        return chosen


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


def measure(subject: Subject, accelerator: Accelerator, *, keep_predictions: bool) -> EvaluationResult:
    """Evaluate the models. Collective. Raises UserError."""
    began = datetime.now().astimezone()
    config, splits, source, processes = subject.config, subject.splits, subject.source, accelerator.num_processes
    set_defaults(accelerator.device)
    models = {name: model.to(accelerator.device) for name, model in subject.models.items()}
    for model in models.values():  # the same architecture, so the same layout
        layout = use_fastest_memory_format(accelerator, model)

    def evaluated(model: nn.Module) -> Evaluation:
        sampler = EvaluationSampler(len(source), processes * evaluation_batch_size(config, len(source)))
        pipeline = create_input_pipeline(
            config, splits, source, sampler, accelerator, training=False, size=subject.size, memory_format=layout
        )
        return evaluate(accelerator, model, pipeline, keep_logits=True, own=subject.own_metrics)

    if accelerator.is_main_process:
        world = f"{counted(processes, 'process')} on {accelerator.device.type}"
        model_name, data_name = short_name("model.name", config.model.name), short_name("data.name", config.data.name)
        images = f"{len(source):,} images, {world}"
        LOGGER.info(f"{subject.title}: {model_name} on {data_name} {subject.split}, {images}")
    evaluations = {name: evaluated(model) for name, model in models.items()}
    last = evaluations[subject.last]
    about = {"split": subject.split, "data": as_dict(config.data), "time": began.isoformat(timespec="seconds")}

    def figures() -> dict[str, Any]:
        records = {name: _record(evaluation, subject.names[name]) for name, evaluation in evaluations.items()}
        found = {**about, "processes": processes, "classes": subject.splits.classes, **records}
        return dict(json.loads(json.dumps(found)))  # plain lists and numbers, as a file has them

    kept = _predictions(subject, source, last, about) if keep_predictions and accelerator.is_main_process else None
    found = broadcast_from_main(accelerator, figures)
    if (warning := last.warning(subject.split)) is not None and accelerator.is_main_process:
        LOGGER.warning(warning)
    return EvaluationResult(found, splits.multi_label, config.metrics, kept)


def _array(values: Tensor | None) -> npt.NDArray[Any]:
    assert values is not None  # the main process has them
    array: npt.NDArray[Any] = values.numpy()
    return array


def _predictions(subject: Subject, source: Source, evaluation: Evaluation, about: Mapping[str, Any]) -> Predictions:
    return Predictions(
        ids=np.arange(len(source)),
        labels=_array(evaluation.labels),
        logits=_array(evaluation.logits),
        paths=[source.name(id) for id in range(len(source))] if Path(source.name(0)).is_file() else None,
        classes=subject.splits.classes,
        about={**subject.about, **about},
    )


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
