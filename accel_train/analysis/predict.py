"""`accel-train predict RUN IMAGE…`: the most probable classes of images, according to the model of a run.

It needs config.yaml, model.json and the weights of the run, but not the training data.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from accel_train.analysis.load_run import find_weights, load_model, read_config
from accel_train.config.schema import Augment
from accel_train.data.sources.folder import find_images
from accel_train.data.sources.images import MAX_PIXELS, ImageError, decode
from accel_train.data.transforms.batch import BatchTransform
from accel_train.data.transforms.image import ImageTransform
from accel_train.errors import UserError
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
    """They add up to 1 over all classes, of which only the first are here."""
    error: str = ""
    """Why the image cannot be read; there are no classes then."""


def predict(
    launch: Launch,
    run: Path,
    images: Sequence[Path],
    *,
    top_k: int,
    output: Path | None,
    batch_size: int,
    max_pixels: int | None = None,
    trust_code: bool = False,
) -> int:
    """Classify image files, and those below folders, with the final or newest weights of the run in the folder `run`.

    `top_k`: how many classes are shown for an image. `output`: a .csv file (a row for each image and class) or a .jsonl
    file (a line for each image); None: print a table. An image that cannot be read, or that has more than `max_pixels`
    (None: as in training), gets a row without a class and a message on stderr. Returns the exit code: 1 if there was
    such an image. Raises UserError.
    """
    if launch.world_size > 1:
        raise UserError(
            f"accel-train predict runs in one process, but {launch.world_size} were started; use no launcher."
        )
    configuration = read_config(run, uses=("model.name",), trust_code=trust_code)
    info = read_model_info(run)
    if info.full_scale != 255 or info.channels not in (1, 3):
        raise UserError(
            f"{run} was trained on tensors that {configuration.data.name} prepares, so image files "
            "cannot be prepared in the same way. `accel-train evaluate` measures it on that data."
        )
    paths = [path for image in images for path in _image_files(image)]
    if output is not None:
        try:
            check_writable(output)
        except OSError as error:
            raise _cannot_write(output, error) from error

    accelerator = create_accelerator(launch)
    name, weights = list(find_weights(run).items())[-1]  # the EMA if there is one
    model = load_model(configuration.model, info, weights)
    most = max_pixels or configuration.data.max_pixels
    classifier = Classifier(model, info, configuration.augment, accelerator, top_k, most)
    kind = " (EMA)" if name == "ema" else ""
    print(f"{short_name('model.name', configuration.model.name)}, weights: {weights}{kind}", file=sys.stderr)

    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    predictions: list[Prediction] = []
    unreadable = 0
    batches = [paths[first : first + batch_size] for first in range(0, len(paths), batch_size)]
    shown: Iterable[list[Path]] = batches
    if console.is_terminal and len(batches) > 1:
        shown = track(batches, "classifying", console=console, transient=True)
    with ThreadPoolExecutor(available_cores()) as pool:
        for batch in shown:
            read = list(pool.map(classifier.read, batch))
            readable = [(path, image) for path, image in zip(batch, read, strict=True) if isinstance(image, Tensor)]
            classified = iter(classifier.classify(*zip(*readable, strict=True)) if readable else ())
            for path, image in zip(batch, read, strict=True):  # a row for each image, in the given order
                if isinstance(image, Tensor):
                    predictions.append(next(classified))
                else:
                    predictions.append(Prediction(path, (), (), error=image))
                    unreadable += 1
                    console.print(f"{path} cannot be read: {image}.")

    if output is None:
        _print(predictions)
    else:
        try:
            atomic_write(output, _csv(predictions) if output.suffix == ".csv" else _jsonl(predictions))
        except OSError as error:
            raise _cannot_write(output, error) from error
        print(f"{len(predictions)} image{'s' * (len(predictions) != 1)}: {output}")
    if unreadable:
        console.print(f"{unreadable} of {len(paths)} images cannot be read.")
    return 1 if unreadable else 0


def _cannot_write(output: Path, error: OSError) -> UserError:
    return UserError(f"--output: {output} cannot be written ({error.strerror}); name another one.")


class Classifier:
    """A trained model with the decoding and preprocessing of the run's evaluation."""

    def __init__(
        self,
        model: nn.Module,
        info: ModelInfo,
        augment: Augment,
        accelerator: Accelerator,
        top_k: int,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.model = model.to(accelerator.device)
        self.info, self.accelerator = info, accelerator
        self.top_k, self.max_pixels = min(top_k, len(info.classes)), max_pixels
        native = info.native_size
        if native is None:
            self.resize = ImageTransform(augment, info.image_size, training=False)
        else:  # images of the dataset's size stay as they are here; `normalise` treats them as in evaluation
            self.resize = ImageTransform(Augment(resize=native), native, training=False)
        self.normalise = BatchTransform(
            augment,
            size=info.image_size,
            mean=info.mean,
            std=info.std,
            num_classes=len(info.classes),
            training=False,
            per_image=native is None,
            device=accelerator.device,
        )

    def read(self, path: Path) -> Tensor | str:
        """Return an image, uint8 [1, C, H, W] with one size for all images, or the reason why it cannot be read."""
        try:
            image = decode(path.read_bytes(), self.info.channels, self.max_pixels)
            return self.resize([image], torch.zeros(1))
        except (ImageError, OSError) as error:
            return (isinstance(error, OSError) and error.strerror) or str(error)

    @torch.inference_mode()
    def classify(self, paths: Sequence[Path], images: Sequence[Tensor]) -> list[Prediction]:
        """Return the most probable classes of images that `read` returned."""
        pixels = torch.cat(list(images)).to(self.accelerator.device)
        unused = torch.zeros(len(pixels), dtype=torch.int64, device=pixels.device)
        inputs, _ = self.normalise({"images": pixels, "labels": unused, "keys": unused, "weights": unused})
        with self.accelerator.autocast():
            logits = self.model(inputs).float()
        best = logits.softmax(1).topk(self.top_k)
        return [
            Prediction(path, tuple(self.info.classes[label] for label in labels), tuple(probabilities))
            for path, labels, probabilities in zip(paths, best.indices.tolist(), best.values.tolist(), strict=True)
        ]


def _image_files(path: Path) -> list[Path]:
    """Return the file itself, whatever its name, or the sorted image files below a folder."""
    if not path.is_dir():
        return [path]
    names = find_images(path).images
    if not names:
        raise UserError(f"{path}: no image was found in this folder; name image files or another folder.")
    return [path / name for name in names]


def _rows(predictions: Iterable[Prediction], unreadable: str = "") -> Iterator[tuple[Path, str, str, float | str, str]]:
    """Yield image, rank, class, probability and error; for an unreadable image one row with the class `unreadable`."""
    for prediction in predictions:
        for rank, (name, probability) in enumerate(zip(prediction.classes, prediction.probabilities, strict=True), 1):
            yield prediction.image, str(rank), name, probability, ""
        if prediction.error:
            yield prediction.image, "", unreadable, "", prediction.error


def _print(predictions: Sequence[Prediction]) -> None:
    rows = [
        (str(image), name, probability if isinstance(probability, str) else f"{probability:.2%}")
        for image, _, name, probability, _ in _rows(predictions, "cannot be read")
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
