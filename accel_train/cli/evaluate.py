"""`accel-train evaluate` and `predict`: a run's model on a split, or on any images."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from accel_train.cli.common import WeightsOptions, importing, print_table
from accel_train.config.declaration import FRACTION, POSITIVE, RUN_WORD, Word, ending
from accel_train.config.options import given_keys, parse_command
from accel_train.config.recipe import not_a_run
from accel_train.errors import UserError, counted, is_terminal, print_line, writing
from accel_train.files import atomic_replacement, check_writable, fsync
from accel_train.launch.environment import prepare_environment

if TYPE_CHECKING:
    from accel_train.tools.evaluate_run import EvaluationResult
    from accel_train.tools.load_run import Prediction


@dataclass(frozen=True, kw_only=True)
class Evaluate(WeightsOptions):
    """Evaluate a run's model over every sample of a split, each exactly once, with the run's own configuration.

    --data.KEY VALUE changes the data of the run: another folder, or a limit; --model.eval-image-size,
    --augment.resize and --augment.crop-fraction change the size of the images. With several processes: accelerate
    launch … -m accel_train evaluate RUN. All metrics, also per class, are written to RUN/evaluation-SPLIT.json, which
    the next evaluation overwrites, and to a new file in RUN/evaluations.
    """

    TRAIN_OPTIONS = ("data.", "model.eval-image-size", "augment.resize", "augment.crop-fraction")

    run: Annotated[Path, RUN_WORD]
    """Folder of the run."""
    split: Literal["test", "val", "train"] = "test"
    """Split to evaluate; the training samples are not augmented."""
    predictions: Annotated[Path | None, ending(".npz")] = None
    """Write the label and the logits of each sample to this .npz file, of the EMA if the run has one."""

    def mistakes(self) -> list[str]:
        return not_a_run(self.run)


def evaluate(arguments: Sequence[str]) -> int:
    """Run `accel-train evaluate`; return the exit code."""
    if "model.image-size" in given_keys(arguments):
        raise UserError("--model.image-size: is that of the run's training; give --model.eval-image-size.")
    options, overrides = parse_command(Evaluate, arguments)

    launch = prepare_environment()  # before torch is imported, because torch reads some of these variables
    with importing(str(options.run)):
        from accel_train.launch.agreement import end_world
        from accel_train.tools.evaluate_run import evaluate_run

    result = evaluate_run(
        launch,
        options.run,
        split=options.split,
        checkpoint=options.checkpoint,
        overrides=overrides,
        trust_code=options.trust_code,
        keep_predictions=options.predictions is not None,
    )
    file, predictions = result.file(options.run), options.predictions
    failures = result.keep(options.run, predictions) if launch.rank == 0 else []
    end_world()
    if launch.rank != 0:
        return 0
    print_metrics(result)
    print_line("")
    if predictions is not None and predictions not in failures:
        print_line(f"the logits of {result.last['weights']}: {predictions}")
    if file not in failures:
        print_line(f"all classes{' and the confusion counts' if 'confusion' in result.last else ''}: {file}")
    return 1 if failures else 0


SHOWN = 20  # at most so many classes are printed


def print_metrics(result: EvaluationResult) -> None:
    """Print the metrics of the model and, if there is one, of the EMA; then those of each class, of the last of these,
    and which classes have no image."""
    from accel_train.tools.evaluate_run import class_table, images_of_classes, metric_table, without_images

    found, last = result.metrics, result.last
    records = [found[name] for name in ("model", "ema") if name in found]
    tables = [metric_table(records, found["classes"], result.task.evaluation_metrics(result.chosen))]
    if "class_recall" in last:  # else the model's output is NaN
        tables.append(class_table(last, found["classes"], {"images": images_of_classes(last)}, SHOWN))
    for table in tables:
        print_line("")
        if table.title:
            print_line(f"{table.title}:")
        print_table(table.head, table.rows, numbers=table.numbers)
    if empty := without_images(last, found["classes"], found["split"]):
        print_line("")
        print_line(empty)


@dataclass(frozen=True, kw_only=True)
class Predict(WeightsOptions):
    """Show the most probable classes of images, according to a run's model.

    The row of an image that cannot be read says so; the other images are classified, and the exit code is 1.
    """

    run: Annotated[Path, RUN_WORD]
    """Folder of the run."""
    images: Annotated[tuple[Path, ...], Word("IMAGE|FOLDER …")]
    """Image files, or folders of them."""
    top_k: Annotated[int | None, POSITIVE] = None
    """Number of classes for each image; default: 1 on the console, 5 in a file; with several labels an image: all."""
    threshold: Annotated[float | None, FRACTION] = None
    """Show the classes with at least this probability, for runs with several labels an image; default: 0.5."""
    output: Annotated[Path | None, ending(".csv")] = None
    """Write to this .csv file instead of a table; it is there when all images are done."""

    def mistakes(self) -> list[str]:
        return not_a_run(self.run) + [
            f"{image}: no such image or folder." for image in self.images if not image.exists()
        ]


def predict(arguments: Sequence[str]) -> int:
    """Run `accel-train predict`; return the exit code."""
    options, _ = parse_command(Predict, arguments)
    launch = prepare_environment()
    with importing(str(options.run)):
        from accel_train.launch.accelerator import create_accelerator
        from accel_train.tools.load_run import check_can_classify, image_files, load

    launch.check_alone("predict")
    accelerator = create_accelerator(launch)
    run = load(options.run, options.checkpoint, trust_code=options.trust_code, device=accelerator.device)
    check_can_classify(run.info, options.threshold)
    files: list[Path] = []
    for path in options.images:
        found, left_out = image_files(path)
        files += found
        if left_out:
            print_line(left_out, sys.stderr)
    output = options.output
    if output is not None:
        check_writable("--output", output)
    print_line(run.title, sys.stderr)
    top_k = options.top_k
    if top_k is None and run.info.task.top_k is not None:
        top_k = 1 if output is None else run.info.task.top_k
    found_classes = run.classify(files, top_k, options.threshold, autocast=accelerator.autocast)
    unreadable: list[Path] = []
    predictions = _telling(found_classes, len(files), unreadable)
    if output is None:
        _print(list(predictions))
    else:
        with writing("--output", output):
            _write(output, predictions)
        print_line(f"{counted(len(files), 'image')}: {output}")
    if unreadable:
        print_line(f"{len(unreadable)} of {counted(len(files), 'image')} cannot be read.", sys.stderr)
    return 1 if unreadable else 0


def _telling(predictions: Iterable[Prediction], count: int, unreadable: list[Path]) -> Iterator[Prediction]:
    """Yield the same, with a bar on a terminal if they take more than one batch. Of an image that cannot be read stderr
    says so, and it is added to `unreadable`."""
    from accel_train.tools.load_run import BATCH_SIZE
    from accel_train.tools.pool import progress_bar

    shows_progress = is_terminal(sys.stdout) and count > BATCH_SIZE
    with progress_bar("classifying", count, shows_progress=shows_progress) as advance:
        for prediction in predictions:
            if prediction.error:
                unreadable.append(prediction.image)
                print_line(f"{prediction.image} cannot be read: {prediction.error}.", sys.stderr)
            advance(1)
            yield prediction


def _print(predictions: Sequence[Prediction]) -> None:
    rows: list[tuple[str, ...]] = []
    for prediction in predictions:
        best = zip(prediction.classes, prediction.probabilities, strict=True)
        shown = [(name, f"{value:.2%}") for name, value in best]
        nothing = "cannot be read" if prediction.error else "none"
        rows += [(str(prediction.image), *row) for row in shown or [(nothing, "")]]
    if rows:
        print_table(("image", "class", "probability"), rows, numbers=["probability"])


def _write(path: Path, predictions: Iterable[Prediction]) -> None:
    """Write a CSV file with a row for each class of an image. One without a class, or that is unreadable, has one row.

    The file is there when all are written: a kill leaves what was there before.
    """
    with atomic_replacement(path) as temporary:
        with temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("image", "rank", "class", "probability", "error"))
            for prediction in predictions:
                best = zip(prediction.classes, prediction.probabilities, strict=True)
                rows: list[Any] = [(rank, name, f"{value:.6g}") for rank, (name, value) in enumerate(best, 1)]
                writer.writerows((prediction.image, *row, prediction.error) for row in rows or [("", "", "")])
        fsync(temporary)
