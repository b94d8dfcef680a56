"""`accel-train evaluate RUN`: the figures of a run's model over every sample of a split, exactly once.

    accel-train evaluate runs/digits/…
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml -m accel_train evaluate runs/digits/…

give the same counts. The precision is what the launcher was told, as in training.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_train.analysis.load_run import find_weights, load_model
from accel_train.config.options import parse
from accel_train.config.schema import as_dict
from accel_train.config.semantics import SEMANTICS, check_same_splits
from accel_train.data.loading import create_feed
from accel_train.data.order.samplers import EvaluationOrder
from accel_train.data.sources.load import Source, Splits, load_splits
from accel_train.errors import UserError
from accel_train.evaluate import evaluate, evaluation_batch_size
from accel_train.files import atomic_write
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.consensus import broadcast_from_main
from accel_train.launch.environment import Launch
from accel_train.optim.performance import lay_out, set_defaults
from accel_train.records.metrics import Evaluation
from accel_train.records.model_info import Signature, read_signature
from accel_train.records.table import print_table

SHOWN = 20  # classes on the console


def evaluate_run(launch: Launch, run: Path, *, split: str, checkpoint: Path | None, overrides: Sequence[str]) -> int:
    """Evaluate the weights of the run in the folder `run`, and their running mean if it keeps one.

    `split`: "train" (without augmentation), "val" or "test". `checkpoint`: see `find_weights`. `overrides`: options
    of the run's data (--data.KEY VALUE). Prints the figures and writes them to RUN/evaluation-SPLIT.json. Returns the
    exit code: 1 if they could not be written. Raises UserError.
    """
    config = parse([str(run / "config.yaml"), *overrides])
    signature = read_signature(run)
    if signature.semantics != SEMANTICS:
        check_same_splits(str(run), signature.semantics, as_dict(parse([str(run / "config.yaml")]).data))
    # The model was trained with these, even if it is evaluated on other data than that which they were taken from.
    augment = dataclasses.replace(config.augment, mean=signature.mean, std=signature.std)
    config = dataclasses.replace(config, augment=augment)

    accelerator = create_accelerator(launch)
    weights = broadcast_from_main(accelerator, lambda: find_weights(run, checkpoint))
    splits = load_splits(config.data, config.seed)
    source = _source(splits, split, config.data.name)
    _check_fit(splits, signature, run)
    order = EvaluationOrder(len(source), evaluation_batch_size(config, launch.world_size))
    set_defaults(accelerator.device)
    models = {name: load_model(config.model, signature, file).to(accelerator.device) for name, file in weights.items()}
    for model in models.values():  # of one kind, and so of one layout
        layout = lay_out(accelerator, model)
    size = signature.image_size
    feed = create_feed(config, splits, source, order, accelerator, training=False, size=size, memory_format=layout)
    if accelerator.is_main_process:
        processes = f"{launch.world_size} process{'es' * (launch.world_size > 1)} on {accelerator.device.type}"
        print(
            f"{run}: {config.model.name} on {config.data.name} {split}, {len(source):,} images, {processes}", flush=True
        )
    found = {name: evaluate(accelerator, model, feed) for name, model in models.items()}
    accelerator.end_training()
    if not accelerator.is_main_process:
        return 0
    names = {name: str(file.relative_to(run) if file.is_relative_to(run) else file) for name, file in weights.items()}
    _print_figures(found, names, signature.classes)
    output = run / f"evaluation-{split}.json"
    record = {
        "split": split,
        "data": as_dict(config.data),
        "processes": launch.world_size,
        "classes": signature.classes,
        **{name: _record(figures, names[name]) for name, figures in found.items()},
    }
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(output, json.dumps(record) + "\n")
    except OSError as error:
        print(f"accel-train: warning: {output} cannot be written ({error.strerror}).", file=sys.stderr)
        return 1
    print(f"\nall classes and the confusion counts: {output}")
    return 0


def _source(splits: Splits, split: str, data: str) -> Source:
    sources = {"train": splits.to_train_on, "val": splits.validation, "test": splits.test}
    found = sources.get(split)
    if found is None:
        known = " and ".join(name for name, source in sources.items() if source is not None)
        raise UserError(f"--split {split}: the data '{data}' has no such split; it has {known}.")
    return found


def _check_fit(splits: Splits, signature: Signature, run: Path) -> None:
    """Raise UserError unless the data has the model's classes, in its order, and its channels."""
    known, found = signature.classes, splits.classes
    if found != known:
        which = f"{len(known)} there and {len(found)} here"
        if len(found) == len(known):
            at = next(at for at in range(len(known)) if found[at] != known[at])
            which = f"number {at} is {known[at]!r} there and {found[at]!r} here"
        raise UserError(f"the data has other classes than those that {run} was trained on: {which}.")
    if splits.channels != signature.channels:
        raise UserError(
            f"the images have {splits.channels} channels, but the model of {run} takes {signature.channels}: "
            f"give --data.channels {signature.channels} if the data can be read so."
        )


def _print_figures(found: dict[str, Evaluation], names: dict[str, str], classes: Sequence[str]) -> None:
    """Two tables: the figures of each kind of weights, and each class (or the worst ones, if they are many)."""
    head = ["weights", "loss", "top-1", "top-5"]
    rows = [
        [names[name], f"{figures.loss:.4f}", f"{figures.accuracy:.2%}", f"{figures.top5_accuracy:.2%}"]
        for name, figures in found.items()
    ]
    if len(classes) <= 5:  # all of them are among the five most probable
        head, rows = head[:-1], [row[:-1] for row in rows]
    print()
    print_table(head, rows, numbers=head[1:])

    accuracies = {name: figures.class_accuracy for name, figures in found.items()}
    last = list(found)[-1]  # the running mean, if there is one
    shown = [at for at, accuracy in enumerate(accuracies[last]) if accuracy is not None]
    if len(shown) > SHOWN:
        shown = sorted(shown, key=lambda at: accuracies[last][at] or 0.0)[:SHOWN]
        print(f"\nthe {SHOWN} classes of the lowest accuracy, of {len(classes)}:")
    else:
        print()
    head = [
        "class",
        "images",
        *(f"top-1 ({name})" if len(found) > 1 else "top-1" for name in found),
        "most often taken for",
    ]
    rows = []
    for at in shown:
        confused = found[last].confusion[at]
        other = max((label for label in range(len(classes)) if label != at), key=confused.__getitem__)
        mistake = f"{classes[other]} ({confused[other]})" if confused[other] else ""
        figures = [f"{accuracy[at]:.2%}" for accuracy in accuracies.values()]
        rows.append([classes[at], str(sum(confused)), *figures, mistake])
    print_table(head, rows, numbers=head[1:-1])


def _record(figures: Evaluation, weights: str) -> dict[str, Any]:
    """The figures as JSON has them, which knows no NaN."""
    loss = figures.loss if math.isfinite(figures.loss) else None
    return {"weights": weights, **dataclasses.asdict(figures), "loss": loss, "class_accuracy": figures.class_accuracy}
