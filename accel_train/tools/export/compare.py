"""Is an export the run's model? It is loaded again and compared with the run, on real images, before it is done."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from accel_train.data.sources.splits import Source
from accel_train.errors import UserError, first_of
from accel_train.records.model_info import ModelInfo
from accel_train.tools.export.formats import Loaded, prepare
from accel_train.tools.load_run import LoadedRun, data_of_run
from accel_train.user_code.reference import short_name

COUNT = 64  # images
LARGEST_DIFFERENCE = 1e-3  # of logits, from equal inputs
TIE = 0.01
"""Classes to which `predict` gives probabilities that differ by less count as the same: Pillow and torchvision round
differently, so pixels may differ by 1 of 255."""


@dataclass(frozen=True)
class Images:
    """Some images, as the model's input and as files."""

    described: str
    inputs: Tensor
    """float32 [n, channels, size, size], as in the run's evaluation."""
    files: tuple[Path, ...]
    """The same images; none if image files cannot be prepared for the model, or if the inputs are random."""


def real_images(run: LoadedRun, folder: Path, *, trust_code: bool) -> Images:
    """Up to 64 images, spread over the test split, or else the validation or training split.

    Random inputs if the data is not here. Images that are not in files of their own are written into `folder`.
    """
    try:
        _, splits = data_of_run(run.path, trust_code=trust_code)
        chosen = {"test": splits.test, "validation": splits.validation, "training": splits.to_train_on}
        split, source = next((split, source) for split, source in chosen.items() if source)
        name = f"{short_name('data.name', run.config.data.name)} ({split} split)"
        return _of_source(name, source, run, folder)
    except UserError as error:
        return _random(run.info, str(error).partition(";")[0].rstrip("."))


def _of_source(name: str, source: Source, run: LoadedRun, folder: Path) -> Images:
    """Raises UserError if no image can be read."""
    inputs, files = [], []
    for id in np.unique(np.linspace(0, len(source) - 1, COUNT).round().astype(int)).tolist():
        try:
            pixels = torch.as_tensor(source.fetch([id])[0]).cpu()
        except UserError:
            continue
        inputs.append(run.transform(pixels))
        if run.info.takes_files:
            files.append(_as_file(Path(source.name(id)), pixels, folder / f"{id}.png"))
    if not inputs:
        raise UserError("none of the images that were tried can be read")
    described = f"{len(inputs)} images of {name}"
    return Images(described, torch.stack(inputs), tuple(files))


def _as_file(file: Path, pixels: Tensor, new: Path) -> Path:
    """The image's own file; or `new`, written, if it has none."""
    if file.is_file():
        return file
    Image.fromarray(pixels.permute(1, 2, 0).squeeze(2).contiguous().numpy()).save(new)
    return new


def _random(info: ModelInfo, reason: str) -> Images:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, info.channels, info.image_size, info.image_size, generator=generator)
    return Images(f"8 random inputs ({reason})", inputs, ())


def check(run: LoadedRun, exported: Loaded, rules: dict[str, Any], images: Images) -> Iterator[str]:
    """Compare an export with the run's model, both on the CPU, on the same images; yield a line for each comparison.

    Raises UserError if they differ.
    """
    all_and_one = images.inputs, images.inputs[:1]
    differences = [_logits(run.model, inputs) - _logits(exported, inputs) for inputs in all_and_one]
    difference = float(torch.cat(differences).abs().max())
    yield f"equal inputs: logits differ by at most {difference:.1e}, for {images.described}"
    if not difference <= LARGEST_DIFFERENCE:  # also if it is NaN
        raise _refused(f"from equal inputs the logits differ by up to {difference:.3g}, more than {LARGEST_DIFFERENCE}")
    if not images.files:
        yield "from files: not compared, because there are no image files of the run's data here"
        return

    threshold = None if run.info.task.threshold is None else 0.0  # all classes
    count, different = 0, []
    for prediction in run.classify(images.files, None, threshold):
        if prediction.error:
            continue
        count += 1
        inputs = torch.from_numpy(prepare(prediction.image, rules).copy())
        said = run.classes[int(_logits(exported, inputs[None]).argmax())]
        chances = dict(zip(prediction.classes, prediction.probabilities, strict=True))
        if not chances[said] > prediction.probabilities[0] - TIE:
            different.append(f"{prediction.image} ({prediction.classes[0]} by predict, {said} here)")
    yield f"from files by preprocess.json: the same class as predict for {count - len(different)} of {count} images"
    if different:
        shown = first_of(different)
        raise _refused(f"from files {len(different)} of {count} images get another class than by predict: {shown}")


def _refused(reason: str) -> UserError:
    return UserError(f"{reason}. The export was not written.", code=1)


def _logits(model: Loaded | nn.Module, inputs: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(inputs).float()
