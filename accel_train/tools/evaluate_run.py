"""A run's model evaluated on every sample of a split, each counted exactly once, on any number of processes.

First the metrics that follow from the labels and the model's logits, then the predictions file, then the evaluation.
Its precision is the one given on the launch command, as in training.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from accelerate import Accelerator
from scipy.special import expit, log_expit, logsumexp, softmax
from torch import Tensor, nn

from accel_train.checkpoint.reading import RunWeights, weights_of_run
from accel_train.checkpoint.state import broadcast_weights, named_tensors
from accel_train.config.schema import Config, as_dict
from accel_train.data.loading import create_input_pipeline, evaluation_batch_size
from accel_train.data.order import EvaluationSampler
from accel_train.data.sources.load import Source, Splits, splits_of
from accel_train.errors import LOGGER, UserError, counted, first_of
from accel_train.evaluate import evaluate
from accel_train.files import atomic_replacement, atomic_write, open_to_write
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.agreement import broadcast_from_main
from accel_train.launch.environment import Launch
from accel_train.optim.performance import set_defaults, use_fastest_memory_format
from accel_train.records.metrics import Evaluation, OwnMetrics, create_own_metrics
from accel_train.records.model_info import ModelInfo, read_model_info
from accel_train.task import Metric, Task
from accel_train.tools.load_run import empty_model, may_download, read_config
from accel_train.user_code import given_metrics, short_name

Floats = npt.NDArray[np.float64]

BINS = 15  # of the calibration error, as in Guo et al. 2017
WORST = 20  # images that are named
NO_VALUE = "\u2013"  # of a class without images
CONFUSED = "confused with"  # the title of the column with the class for which one is most often mistaken
# What the table calls it -> the key of a list with a metric of each class.
CLASS_METRICS = {name: f"class_{name}".replace(" ", "_") for name in ("average precision", "precision", "recall", "f1")}


EVALUATE_METRICS = [
    Metric("balanced_accuracy", title="balanced accuracy"),
    Metric("precision", title="macro precision"),
    Metric("recall", title="macro recall"),
    Metric("calibration_error", title="calibration error"),
]
"""What `added_metrics` returns for a whole split, and what tables call each."""


def added_metrics(logits: npt.NDArray[np.float32], labels: npt.NDArray[Any]) -> dict[str, Any]:
    """Metrics beside those of every evaluation, from logits float32 [n, classes] and labels int64 [n]; or, if an image
    may have several labels, bool [n, classes]: then the class-wise ones, at a probability of 0.5.

    Precision, recall and F1 are scikit-learn's; "precision" and "recall" are means over the classes that occur as a
    label or as a prediction. "class_…" are lists, None for a class that does not occur. "balanced_accuracy": the mean
    recall of the classes that have an image. For the others see `accuracy_interval` and `calibration_error`.
    """
    if labels.ndim == 2:
        return _precision_and_recall(labels, logits >= 0, logits.shape[1])
    predicted = logits.argmax(1)
    metrics = _precision_and_recall(labels, predicted, logits.shape[1])
    return {
        "accuracy_interval": accuracy_interval(int((predicted == labels).sum()), len(labels)),
        "balanced_accuracy": float(np.mean([metrics["class_recall"][label] for label in np.unique(labels)])),
        **metrics,
        "calibration_error": calibration_error(softmax(logits.astype(np.float64), axis=1), labels),
    }


def _precision_and_recall(labels: npt.NDArray[Any], predicted: npt.NDArray[Any], classes: int) -> dict[str, Any]:
    from sklearn.metrics import precision_recall_fscore_support

    *of_each, images = precision_recall_fscore_support(labels, predicted, labels=range(classes), zero_division=0)
    said = predicted.sum(0) if predicted.ndim == 2 else np.bincount(predicted, minlength=classes)
    occurs = (images > 0) | (said > 0)
    precision, recall = (float(values[occurs].mean()) if occurs.any() else 0.0 for values in of_each[:2])
    return {"precision": precision, "recall": recall} | {
        f"class_{name}": [float(value) if known else None for value, known in zip(values, occurs, strict=True)]
        for name, values in zip(("precision", "recall", "f1"), of_each, strict=True)
    }


def accuracy_interval(hits: int, count: int) -> tuple[float, float]:
    """The 95 % interval of an accuracy of `hits` in `count` images: (lowest, highest).

    All accuracies that a two-sided test at 0.05 does not reject (Wilson 1927, "Probable inference, the law of
    succession, and statistical inference", J. Am. Stat. Assoc. 22). Also all of a few images right leaves a doubt: 10
    of 10 give 72 % to 100 %, where a bootstrap would give 100 % to 100 %.
    """
    from scipy.stats import binomtest

    low, high = binomtest(hits, count).proportion_ci(0.95, method="wilson")
    return float(low), float(high)


def interval_of(record: Mapping[str, Any]) -> tuple[float, float] | None:
    """The 95 % interval of a record's accuracy; None if it has no accuracy."""
    accuracy, count = record.get("accuracy"), record.get("count")
    return None if accuracy is None or not count else accuracy_interval(round(accuracy * count), count)


def interval_text(interval: Sequence[float] | None) -> str:
    """An interval of a fraction, in percent, as tables show it: "72.2 … 100.0%"; "" if there is none."""
    return "" if interval is None else f"{100 * interval[0]:.1f} … {interval[1]:.1%}"


def calibration_error(probabilities: Floats, labels: npt.NDArray[np.int64]) -> float:
    """The expected calibration error: the mean over the images of |accuracy - mean probability| of their bin.

    The images are divided by the probability of the predicted class into BINS bins of equal width (Guo et al. 2017,
    arxiv.org/abs/1706.04599, equation 3).
    """
    confidence = probabilities.max(1)
    hits = probabilities.argmax(1) == labels
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    inside = [bins == number for number in np.unique(bins)]
    return float(sum(part.mean() * abs(hits[part].mean() - confidence[part].mean()) for part in inside))


def worst_images(
    logits: npt.NDArray[np.float32], labels: npt.NDArray[Any], source: Source, classes: Sequence[str]
) -> list[dict[str, Any]]:
    """The WORST wrong images with the highest loss: "id" and "name" in the `source`, and what is "said" of it and
    "true", the predicted and the true classes with their probabilities, as text. For `logits` and `labels` see
    `added_metrics`."""
    one_label, every = labels.ndim == 1, np.arange(len(labels))
    if one_label:
        losses, is_right = logsumexp(logits, axis=1) - logits[every, labels], logits.argmax(1) == labels
    else:  # the mean binary cross-entropy
        losses = -np.where(labels, log_expit(logits), log_expit(-logits)).mean(1)
        is_right = ((logits >= 0) == labels).all(1)
    wrong = np.flatnonzero(~is_right)
    found = []
    for id in wrong[np.argsort(-losses[wrong], kind="stable")][:WORST].tolist():
        chances = (softmax if one_label else expit)(logits[id].astype(np.float64))
        said = [int(logits[id].argmax())] if one_label else np.flatnonzero(logits[id] >= 0).tolist()
        true = [int(labels[id])] if one_label else np.flatnonzero(labels[id]).tolist()
        named = {
            key: ", ".join(f"{classes[label]} ({chances[label]:.1%})" for label in some) or "none"
            for key, some in (("said", said), ("true", true))
        }
        found.append({"id": id, "name": source.name(id), **named})
    return found


@dataclass(frozen=True)
class Table:
    """A table for the terminal and for a page."""

    title: str
    head: list[str]
    rows: list[list[str]]

    @property
    def numbers(self) -> list[str]:
        """The titles of the columns whose values are aligned on the right: all but the first one and CONFUSED."""
        return [title for title in self.head[1:] if title != CONFUSED]


def metric_table(records: Sequence[Mapping[str, Any]], classes: Sequence[str], metrics: Sequence[Metric]) -> Table:
    """A row for each metric that one of the `records` has, a column for each of these. `metrics`: of an evaluation."""
    rows = []
    for metric in [*(each for each in metrics if len(classes) >= each.fewest_classes), *EVALUATE_METRICS]:
        values = [record.get(metric.name) for record in records]
        # One of --metrics may be NaN, which JSON does not have.
        is_nan = metric.chosen and any(metric.name in record for record in records)
        if is_nan or any(value is not None for value in values):
            empty = "NaN" if is_nan else ""
            shown = [empty if value is None else metric.show(value) for value in values]
            rows.append([metric.title or metric.name, *shown])
        if metric.name == "accuracy" and any(intervals := [interval_of(record) for record in records]):
            rows.append(["  95% interval", *map(interval_text, intervals)])
    return Table("", ["", *(str(record["weights"]) for record in records)], rows)


def class_table(
    record: Mapping[str, Any], classes: Sequence[str], images: Mapping[str, Sequence[int]], at_most: int | None = None
) -> Table:
    """A row for each class: its images, its metrics, and the class for which it is most often mistaken.

    `images`: the titles of columns with numbers of images. Of more than `at_most` classes only those are left that the
    split has images of, and of these the ones with the lowest recall (or average precision).
    """
    evaluated, confusion = images_of_classes(record), record.get("confusion")
    columns = {title: record[key] for title, key in CLASS_METRICS.items() if key in record}
    labels, title = list(range(len(classes))), ""
    if at_most is not None and len(labels) > at_most:
        labels = [label for label in labels if evaluated[label]]
        if len(labels) > at_most:
            first = "recall" if confusion is not None else "average precision"
            labels = sorted(labels, key=lambda label: columns[first][label] or 0.0)[:at_most]
            title = f"the {at_most} classes with the lowest {first}, of {len(classes)}"
    rows = []
    for label in labels:
        row = [classes[label], *(str(counts[label]) for counts in images.values())]
        for values in columns.values():
            value = values[label] if evaluated[label] else None
            row.append((NO_VALUE if not evaluated[label] else "") if value is None else f"{value:.2%}")
        if confusion is not None:
            counts = confusion[label]
            other = max((number for number in range(len(classes)) if number != label), key=counts.__getitem__)
            row.append(f"{classes[other]} ({counts[other]})" if counts[other] else "")
        rows.append(row)
    return Table(title, ["class", *images, *columns, *[CONFUSED] * (confusion is not None)], rows)


def images_of_classes(record: Mapping[str, Any]) -> list[int]:
    """How many images of each class were evaluated; [] if that is not known."""
    confusion = record.get("confusion")
    images: list[int] = record.get("class_images", []) if confusion is None else [sum(row) for row in confusion]
    return images


def without_images(record: dict[str, Any], classes: Sequence[str], split: str) -> str:
    """Which classes the split has no image of: "no test images: cat, dog (2 of 10 classes)". Or ""."""
    names = [name for name, count in zip(classes, images_of_classes(record), strict=True) if not count]
    return f"no {split} images: {first_of(names, 10)} ({len(names)} of {len(classes)} classes)" if names else ""


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation has measured."""

    metrics: dict[str, Any]
    """As RUN/evaluation-SPLIT.json has them (docs/run_files.md): the same on all processes."""
    task: Task
    chosen: tuple[str, ...] = ()
    """The run's --metrics."""
    predictions: Mapping[str, npt.NDArray[Any]] | None = None
    """The arrays of the .npz file (docs/evaluate.md), such as "labels" and "logits" of each sample, if they are kept;
    on the main process only."""

    def __repr__(self) -> str:
        shown = [f"{name}={value:.4f}" for name, value in self.last.items() if isinstance(value, float)]
        return f"EvaluationResult({self.metrics['split']}, {self.last['count']} images, {', '.join(shown[:8])})"

    @property
    def last(self) -> dict[str, Any]:
        """The metrics of the EMA if the run has one, else of the model."""
        return dict(self.metrics.get("ema") or self.metrics["model"])

    def keep(self, run: Path, predictions: Path | None = None) -> list[Path]:
        """Write the metrics to the run's evaluation-SPLIT.json, and to a file of its evaluations/ that stays; and the
        predictions. Warns of the files that cannot be written, and returns them."""
        text = json.dumps(self.metrics) + "\n"
        files = [self.file(run), run / "evaluations" / f"{self.metrics['split']}-{datetime.now():%Y%m%d-%H%M%S}.json"]
        writers: dict[Path, Callable[[Path], None]] = {path: lambda path: atomic_write(path, text) for path in files}
        if predictions is not None and self.predictions is not None:
            writers[predictions] = partial(_save, self.predictions)
        failures = []
        for path, write in writers.items():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write(path)
            except OSError as error:
                LOGGER.warning(f"{path} cannot be written ({error.strerror}).")
                failures.append(path)
        return failures

    def file(self, run: Path) -> Path:
        """Where the newest metrics of the run are kept."""
        return run / f"evaluation-{self.metrics['split']}.json"


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
    splits = splits_of(config, download=may_download(config, overrides, trust_code=trust_code))
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

    def as_json() -> dict[str, Any]:
        records = {name: _record(each, names[name], source, splits.classes) for name, each in evaluations.items()}
        found = {**about, "processes": accelerator.num_processes, "classes": splits.classes, **records}
        return dict(json.loads(json.dumps(found)))  # plain lists and numbers, as a file has them

    kept: dict[str, npt.NDArray[Any]] | None = None
    if keep_predictions and accelerator.is_main_process:
        kept = {
            "ids": np.arange(len(source)),
            "labels": _array(chosen.labels),
            "logits": _array(chosen.logits),
            "classes": np.array(splits.classes),
            "about": np.array(json.dumps({"run": str(run), "weights": names[last], **about})),
        }
        if Path(source.name(0)).is_file():
            kept["paths"] = np.array([source.name(id) for id in range(len(source))])
    found = broadcast_from_main(accelerator, as_json)
    if (warning := chosen.warning(split)) is not None and accelerator.is_main_process:
        LOGGER.warning(warning)
    return EvaluationResult(found, splits.task, config.metrics, kept)


def _save(arrays: Mapping[str, Any], path: Path) -> None:
    """Write a .npz file atomically. Raises OSError."""
    with atomic_replacement(path) as temporary, open_to_write(temporary, "xb") as file:
        np.savez(file, **arrays)


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
    usable = [text for text in config.metrics if text in given_metrics() or ":" in text]
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
    if splits.task is not info.task:
        raise UserError(
            f"the data has {splits.task.kind}, but {run} was trained on {info.task.kind}; choose other data with "
            "--data.name or --data.root."
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


def _record(evaluation: Evaluation, weights: str, source: Source, classes: Sequence[str]) -> dict[str, Any]:
    """Return an evaluation for JSON, which has no NaN: that becomes null."""
    metrics = {name: value if math.isfinite(value) else None for name, value in evaluation.metrics.items()}
    logits, labels = _array(evaluation.logits), _array(evaluation.labels)
    # NaN or infinity of broken weights. A logit of -infinity is a class that the model excludes.
    if evaluation.broken or not (logits < np.inf).all():
        more: dict[str, Any] = {}
    else:
        more = {**added_metrics(logits, labels), "worst": worst_images(logits, labels, source, classes)}
    return {"weights": weights, **metrics, "count": evaluation.count, **more, **evaluation.as_record()}
