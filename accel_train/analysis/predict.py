"""`accel-train predict RUN IMAGE…`: the most probable classes of images, according to the model of a run.

It needs config.yaml, model.json and the weights of the run, but not the training data.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from accel_train.analysis.load_run import load_model, read_config
from accel_train.analysis.preprocessing import Preprocessing
from accel_train.checkpoint.weights import one_of_run
from accel_train.data.sources.files.encoded import read_image
from accel_train.data.sources.files.folder import find_images, ignored_text
from accel_train.data.sources.files.images import MAX_PIXELS, ImageError, decode
from accel_train.errors import UserError, print_line, writing
from accel_train.files import atomic_write, check_writable
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.environment import Launch
from accel_train.launch.process import available_cores
from accel_train.records.model_info import ModelInfo, read_model_info
from accel_train.records.table import print_table
from accel_train.user_code.reference import short_name


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one image, the most probable one first."""

    image: Path
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]
    """They add up to 1 over all classes, of which only the first are here. If an image may have several labels, each
    class has one by itself, and only those from a threshold on are here."""
    error: str = ""
    """Why the image cannot be read; there are no classes then."""


def predict(
    launch: Launch,
    run: Path,
    images: Sequence[Path],
    *,
    top_k: int | None = None,
    threshold: float | None = None,
    output: Path | None,
    batch_size: int,
    max_pixels: int | None = None,
    trust_code: bool = False,
) -> int:
    """Classify image files, and those below folders, with the final or newest weights of the run in the folder `run`.

    `top_k`: how many classes are shown for an image; None: 1 in a table and 5 in a file, or, if an image may have
    several labels, all with a probability from the `threshold` on (None: 0.5). `output`: a .csv file (a row for each
    image and class) or a .jsonl file (a line for each image); None: print a table. An image that cannot be read, or
    that has more than `max_pixels` (None: as in training), gets a row without a class and a message on stderr. Returns
    the exit code: 1 if there was such an image. Raises UserError.
    """
    launch.check_alone("predict")
    configuration = read_config(run, uses=("model.name",), trust_code=trust_code)
    info = read_model_info(run)
    check_takes_files(info)
    check_threshold(threshold, info)
    if top_k is None and not info.multi_label:
        top_k = 1 if output is None else 5
    paths = [path for image in images for path in _image_files(image)]
    if output is not None:
        with writing("--output", output):
            check_writable(output)

    accelerator = create_accelerator(launch)
    name, weights = one_of_run(run)
    model = load_model(configuration.model, info, weights)
    kind = " (EMA)" if name == "ema" else ""
    print_line(f"{short_name('model.name', configuration.model.name)}, weights: {weights.file}{kind}", sys.stderr)

    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    classified: Iterable[Prediction] = classify_files(
        model.to(accelerator.device),
        Preprocessing(info, configuration.augment, accelerator.device),
        info,
        paths,
        top_k,
        threshold,
        max_pixels or configuration.data.max_pixels,
        batch_size=batch_size,
        autocast=accelerator.autocast,
    )
    if console.is_terminal and len(paths) > batch_size:
        classified = track(classified, "classifying", len(paths), console=console, transient=True)
    predictions: list[Prediction] = []
    for prediction in classified:
        predictions.append(prediction)
        if prediction.error:
            print_line(f"{prediction.image} cannot be read: {prediction.error}.", sys.stderr)
    unreadable = sum(bool(prediction.error) for prediction in predictions)

    if output is None:
        _print(predictions)
    else:
        with writing("--output", output):
            atomic_write(output, _csv(predictions) if output.suffix == ".csv" else _jsonl(predictions))
        print_line(f"{len(predictions)} image{'s' * (len(predictions) != 1)}: {output}")
    if unreadable:
        print_line(f"{unreadable} of {len(paths)} images cannot be read.", sys.stderr)
    return 1 if unreadable else 0


def classify_files(
    model: nn.Module,
    preprocessing: Preprocessing,
    info: ModelInfo,
    files: Sequence[Path],
    top_k: int | None,
    threshold: float | None = None,
    max_pixels: int = MAX_PIXELS,
    *,
    batch_size: int = 64,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Prediction]:
    """Yield the prediction for each file, in their order. One that cannot be read gets an `error`.

    `model`: on the device of `preprocessing`, in evaluation mode. `top_k`: at most so many classes; None: all.
    `threshold`: the least probability, if an image may have several labels; None: 0.5. `autocast`: makes a context for
    the forward pass.
    Raises UserError if the run's model takes images that only the user's own code can prepare.
    """
    check_takes_files(info)
    check_threshold(threshold, info)
    least = 0.0 if not info.multi_label else 0.5 if threshold is None else threshold

    def read(path: Path) -> Tensor | str:
        try:
            return preprocessing.resize(decode(read_image(path, max_pixels), info.channels, max_pixels, info.range))
        except (ImageError, OSError) as error:
            return (isinstance(error, OSError) and error.strerror) or str(error)

    with ThreadPoolExecutor(available_cores()) as pool:
        for first in range(0, len(files), batch_size):
            batch = files[first : first + batch_size]
            images = list(pool.map(read, batch))
            readable = [image for image in images if isinstance(image, Tensor)]
            results: Iterator[tuple[list[int], list[float]]] = iter(())
            if readable:
                with torch.inference_mode(), autocast():
                    logits = model(preprocessing.to_input(torch.cat(readable))).float()
                chances = logits.sigmoid() if info.multi_label else logits.softmax(1)
                best = chances.topk(min(top_k or len(info.classes), len(info.classes)))
                results = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            for path, image in zip(batch, images, strict=True):
                if isinstance(image, Tensor):
                    labels, probabilities = next(results)
                    count = sum(probability >= least for probability in probabilities)  # they are in decreasing order
                    names = tuple(info.classes[label] for label in labels[:count])
                    yield Prediction(path, names, tuple(probabilities[:count]))
                else:
                    yield Prediction(path, (), (), error=image)


def check_threshold(threshold: float | None, info: ModelInfo) -> None:
    """Raise UserError if there is a threshold, but each image has one label: its most probable class."""
    if threshold is not None and not info.multi_label:
        raise UserError(
            f"--threshold {threshold}: the run was trained with one label an image, the most probable one; use --top-k."
        )


def check_takes_files(info: ModelInfo) -> None:
    """Raise UserError if image files cannot be prepared for the model as its data was."""
    if not info.takes_files:
        raise UserError(
            "the model was trained on tensors that the user's own data prepares, so image files cannot be prepared in "
            "the same way. `accel-train evaluate` measures it on that data."
        )


def _image_files(path: Path) -> list[Path]:
    """Return the file itself, whatever its name, or the sorted image files below a folder."""
    if not path.is_dir():
        return [path]
    contents = find_images(path)
    found = ignored_text(contents.others)
    if not contents.images:
        others = f" (found {found})" if found else ""
        raise UserError(f"{path}: no image was found in this folder{others}; name image files or another folder.")
    if found:
        count = contents.others.total()
        are = "files are not images by their names and are" if count > 1 else "file is not an image by its name and is"
        print_line(f"{path}: {count} {are} left out: {found}.", sys.stderr)
    return [path / name for name in contents.images]


def _rows(
    predictions: Iterable[Prediction], unreadable: str = "", nothing: str = ""
) -> Iterator[tuple[Path, str, str, float | str, str]]:
    """Yield image, rank, class, probability and error.

    An unreadable image has one row with the class `unreadable`, and one without a class the class `nothing`.
    """
    for prediction in predictions:
        for rank, (name, probability) in enumerate(zip(prediction.classes, prediction.probabilities, strict=True), 1):
            yield prediction.image, str(rank), name, probability, ""
        if not prediction.classes:
            yield prediction.image, "", unreadable if prediction.error else nothing, "", prediction.error


def _print(predictions: Sequence[Prediction]) -> None:
    rows = [
        (str(image), name, probability if isinstance(probability, str) else f"{probability:.2%}")
        for image, _, name, probability, _ in _rows(predictions, "cannot be read", "none")
    ]
    if rows:
        print_table(("image", "class", "probability"), rows, numbers=("probability",), grouped=True)


def _csv(predictions: Sequence[Prediction]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("image", "rank", "class", "probability", "error"))
    for image, rank, name, probability, error in _rows(predictions):
        shown = probability if isinstance(probability, str) else f"{probability:.6g}"
        writer.writerow((image, rank, name, shown, error))
    return text.getvalue()


def _jsonl(predictions: Sequence[Prediction]) -> str:
    """Return lines {"image": …, "predictions": [{"class": …, "probability": …}, …]}, with "error" if unreadable."""
    lines = []
    for prediction in predictions:
        pairs = zip(prediction.classes, prediction.probabilities, strict=True)
        best = [{"class": name, "probability": float(f"{probability:.6g}")} for name, probability in pairs]
        line: dict[str, Any] = {"image": str(prediction.image), "predictions": best}
        lines.append(json.dumps(line | ({"error": prediction.error} if prediction.error else {})) + "\n")
    return "".join(lines)
