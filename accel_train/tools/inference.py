"""From an image to a model's input, as in the run's evaluation, and to its most probable classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.config.checks import check_resize
from accel_train.config.schema import Augment
from accel_train.data.sources.files.encoded import read_image
from accel_train.data.sources.files.folder import find_images, ignored_text
from accel_train.data.sources.files.images import MAX_PIXELS, ImageError, decode
from accel_train.data.transforms.batch import BatchTransform
from accel_train.data.transforms.image import ImageTransform
from accel_train.errors import UserError
from accel_train.launch.process import available_cores
from accel_train.records.model_info import ModelInfo


class Preprocessing:
    """The resizing, cropping and normalisation of a run's evaluation."""

    def __init__(self, info: ModelInfo, augment: Augment, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        augment = augment.in_evaluation(info.image_size)
        check_resize(augment, info.image_size)
        native = info.native_size
        if native is None:
            self._image = ImageTransform(augment, info.image_size, training=False)
        else:  # images of the dataset's size stay as they are here; `to_input` treats them as in evaluation
            unchanged = Augment(resize=native, interpolation=augment.interpolation)
            self._image = ImageTransform(unchanged, native, training=False)
        self._batch = BatchTransform(
            augment,
            size=info.image_size,
            mean=info.mean,
            std=info.std,
            full_scale=info.full_scale,
            num_classes=len(info.classes),
            training=False,
            per_image=native is None,
            device=self.device,
        )

    def resize(self, image: Tensor) -> Tensor:
        """`image` [C, H, W] of any size as [1, C, h, w], where h and w are the same for all images."""
        resized: Tensor = self._image([image], torch.zeros(1))
        return resized

    def to_input(self, images: Tensor) -> Tensor:
        """The model's input, float32 [b, C, size, size] on the device, from images [b, C, h, w] of `resize`."""
        pixels = images.to(self.device)
        unused = torch.zeros(len(pixels), dtype=torch.int64, device=self.device)
        inputs, _ = self._batch({"images": pixels, "labels": unused, "keys": unused, "weights": unused})
        return inputs


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
    the forward pass. Raises UserError if the run's model takes images that only the user's own code can prepare.
    """
    check_can_classify(info, threshold)
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


def check_can_classify(info: ModelInfo, threshold: float | None) -> None:
    """Raise UserError if image files cannot be prepared for the model as its data was, or if there is a threshold, but
    each image has one label: its most probable class."""
    if not info.takes_files:
        raise UserError(
            "the model was trained on tensors that the user's own data prepares, so image files cannot be prepared in "
            "the same way. `accel-train evaluate` measures it on that data."
        )
    if threshold is not None and not info.multi_label:
        raise UserError(
            f"--threshold {threshold}: the run was trained with one label an image, the most probable one; use --top-k."
        )


def image_files(path: Path) -> tuple[list[Path], str]:
    """Return the file itself, whatever its name, or the sorted image files below a folder; and what is left out there.

    Raises UserError if a folder has none.
    """
    if not path.is_dir():
        return [path], ""
    contents = find_images(path)
    found = ignored_text(contents.others)
    if not contents.images:
        others = f" (found {found})" if found else ""
        raise UserError(f"{path}: no image was found in this folder{others}; name image files or another folder.")
    count = contents.others.total()
    are = "files are not images by their names and are" if count > 1 else "file is not an image by its name and is"
    return [path / name for name in contents.images], f"{path}: {count} {are} left out: {found}." if found else ""
