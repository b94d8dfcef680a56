"""`accel-train predict`."""

from __future__ import annotations

import csv
import json
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from accel_train.cli.common import below_one, importing, wrong_endings
from accel_train.cli.evaluate import SIZES
from accel_train.cli.table import print_table
from accel_train.config.declaration import RUN, Word
from accel_train.config.options import CommandOptions, parse_command
from accel_train.config.recipe import not_a_run
from accel_train.errors import counted, print_line, writing
from accel_train.files import atomic_replacement, check_writable, fsync
from accel_train.launch.environment import prepare_environment

if TYPE_CHECKING:
    from accel_train.tools.inference import Prediction


@dataclass(frozen=True)
class Predict(CommandOptions):
    """Show the most probable classes of images, according to a run's model.

    --model.eval-image-size, --augment.resize and --augment.crop-fraction change the size of the images. The row of an
    image that cannot be read says so; the other images are classified, and the exit code is 1.
    """

    TRAIN_OPTIONS = SIZES

    run: Annotated[Path, RUN]
    """Folder of the run."""
    images: Annotated[tuple[Path, ...], Word("IMAGE|FOLDER …")]
    """Image files, or folders of them."""
    checkpoint: Path | None = None
    """best (by --best-metric on the validation split), last, or a checkpoint such as update-00001234; default: last,
    the final model, or the newest checkpoint of a run that has not finished."""
    top_k: int | None = None
    """Number of classes for each image; default: 1 on the console, 5 in a file; with several labels an image: all."""
    threshold: float | None = None
    """Show the classes with at least this probability, for runs with several labels an image; default: 0.5."""
    output: Path | None = None
    """Write to this .csv or .jsonl file instead of a table; it is there when all images are done."""
    batch_size: int = 64
    """Images in one forward pass."""
    trust_code: bool = False
    """Execute the code that the run keeps (RUN/code) and fetch the data that it names; read both first."""

    def mistakes(self) -> list[str]:
        mistakes = below_one(top_k=self.top_k, batch_size=self.batch_size)
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            mistakes.append(f"--threshold: expected a number from 0 to 1, found {self.threshold}.")
        mistakes += wrong_endings([".csv", ".jsonl"], output=self.output)
        mistakes += not_a_run(self.run)
        return mistakes + [f"{image}: no such image or folder." for image in self.images if not image.exists()]


def predict(arguments: Sequence[str]) -> int:
    """Run `accel-train predict`; return the exit code."""
    options, sizes = parse_command(Predict, arguments)
    launch = prepare_environment()
    with importing(str(options.run)):
        from accel_train.launch.accelerator import create_accelerator
        from accel_train.tools.inference import check_can_classify, image_files
        from accel_train.tools.load_run import load

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `predict … | head` ends quietly
    launch.check_alone("predict")
    accelerator = create_accelerator(launch)
    run = load(
        options.run, options.checkpoint, trust_code=options.trust_code, device=accelerator.device, overrides=sizes
    )
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
    top_k = printed = options.top_k
    if top_k is None and not run.info.multi_label:
        top_k, printed = (1 if output is None else 5), 1
    found_classes = run.classify(
        files,
        top_k,
        options.threshold,
        batch_size=options.batch_size,
        autocast=accelerator.autocast,
    )
    unreadable: list[Path] = []
    predictions = _telling(_with_progress(found_classes, len(files), options.batch_size), unreadable)
    if output is None:
        _print(list(predictions), printed)
    else:
        with writing("--output", output):
            _write(output, predictions)
        print_line(f"{counted(len(files), 'image')}: {output}")
    if unreadable:
        print_line(f"{len(unreadable)} of {counted(len(files), 'image')} cannot be read.", sys.stderr)
    return 1 if unreadable else 0


def _with_progress(predictions: Iterable[Prediction], count: int, batch_size: int) -> Iterable[Prediction]:
    """The same, with a bar on a terminal's stderr if they take more than one batch."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    if not console.is_terminal or count <= batch_size:
        return predictions
    return track(predictions, "classifying", count, console=console, transient=True)


def _telling(predictions: Iterable[Prediction], unreadable: list[Path]) -> Iterator[Prediction]:
    """Yield the same. Of an image that cannot be read stderr says so, and it is added to `unreadable`."""
    for prediction in predictions:
        if prediction.error:
            unreadable.append(prediction.image)
            print_line(f"{prediction.image} cannot be read: {prediction.error}.", sys.stderr)
        yield prediction


def _print(predictions: Sequence[Prediction], top_k: int | None) -> None:
    rows: list[tuple[str, ...]] = []
    for prediction in predictions:
        best = islice(zip(prediction.classes, prediction.probabilities, strict=True), top_k)
        shown = [(name, f"{value:.2%}") for name, value in best]
        nothing = "cannot be read" if prediction.error else "none"
        rows += [(str(prediction.image), *row) for row in shown or [(nothing, "")]]
    if rows:
        print_table(("image", "class", "probability"), rows, numbers=["probability"], grouped=True)


def _write(path: Path, predictions: Iterable[Prediction]) -> None:
    """Write a file line by line. It is there when all are written: a kill leaves what was there before."""
    write = _write_csv if path.suffix == ".csv" else _write_jsonl
    with atomic_replacement(path) as temporary:
        with temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            write(file, predictions)
        fsync(temporary)


def _write_csv(file: TextIO, predictions: Iterable[Prediction]) -> None:
    """Write a row for each class of an image. One without a class, or that is unreadable, has one row."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("image", "rank", "class", "probability", "error"))
    for prediction in predictions:
        best = zip(prediction.classes, prediction.probabilities, strict=True)
        rows: list[tuple[Any, ...]] = [(rank, name, f"{value:.6g}") for rank, (name, value) in enumerate(best, 1)]
        writer.writerows((prediction.image, *row, prediction.error) for row in rows or [("", "", "")])


def _write_jsonl(file: TextIO, predictions: Iterable[Prediction]) -> None:
    """Write lines {"image": …, "predictions": [{"class": …, "probability": …}, …]}, with "error" if unreadable."""
    for prediction in predictions:
        best = zip(prediction.classes, prediction.probabilities, strict=True)
        found = [{"class": name, "probability": float(f"{value:.6g}")} for name, value in best]
        line: dict[str, Any] = {"image": str(prediction.image), "predictions": found}
        file.write(json.dumps(line | ({"error": prediction.error} if prediction.error else {})) + "\n")
