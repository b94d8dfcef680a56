"""Is an export the run's model? It is loaded again and compared with the run, on real images, before it is done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from accel_train.data.sources.files.images import is_deep
from accel_train.data.sources.splits import Source
from accel_train.errors import UserError
from accel_train.records.model_info import ModelInfo
from accel_train.tools.export.formats import Loaded, prepare
from accel_train.tools.load_run import LoadedRun, data_of_run
from accel_train.user_code.reference import short_name

COUNT = 64  # images
LARGEST_DIFFERENCE = 1e-3  # of logits, from equal inputs
TIE = 0.01
"""Two classes to which `predict` gives probabilities that differ by less are a tie: Pillow and torchvision round
differently, so pixels may differ by 1 of 255."""
BATCH = 16


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
    mistake: UserError | None = None
    for id in np.unique(np.linspace(0, len(source) - 1, COUNT).round().astype(int)).tolist():
        try:
            pixels = torch.as_tensor(source.fetch([id])[0]).cpu()
        except UserError as error:
            mistake = error
            continue
        inputs.append(run.transform(pixels))
        if run.info.takes_files:
            files.append(_as_file(Path(source.name(id)), pixels, folder / f"{id}.png"))
    if not inputs:
        raise mistake or UserError("the data has no images.")
    described = f"{len(inputs)} images of {name}"
    return Images(described, torch.stack(inputs), tuple(files))


def _as_file(file: Path, pixels: Tensor, new: Path) -> Path:
    """The image's own file; or `new`, written, if it has none, or one of more than 8 bits, which must be converted."""
    if file.is_file():
        with Image.open(file) as opened:
            if not is_deep(opened):
                return file
    Image.fromarray(pixels.permute(1, 2, 0).squeeze(2).contiguous().numpy()).save(new)
    return new


def _random(info: ModelInfo, reason: str) -> Images:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, info.channels, info.image_size, info.image_size, generator=generator)
    return Images(f"8 random inputs ({reason})", inputs, ())


@dataclass(frozen=True)
class Comparison:
    """What the comparison has found: lines for the user, and failures among them."""

    lines: tuple[str, ...]
    failures: tuple[str, ...]


def check(run: LoadedRun, exported: Loaded, rules: dict[str, Any], images: Images) -> Comparison:
    """Compare an export with the run's model, both on the CPU, on the same images."""
    info = run.info
    lines, failures = [], []
    expected = _logits(run.model, images.inputs)
    difference = max(
        float((expected - _logits(exported, images.inputs)).abs().max()),
        float((expected[:1] - _logits(exported, images.inputs[:1])).abs().max()),  # a batch of 1
    )
    lines.append(f"equal inputs: logits differ by at most {difference:.1e}, for {images.described}")
    if not difference <= LARGEST_DIFFERENCE:  # also if it is NaN
        failures.append(
            f"from equal inputs the logits differ by up to {difference:.3g}, more than {LARGEST_DIFFERENCE}"
        )
    if not images.files:
        lines.append("from files: not compared, because there are no image files of the run's data here")
        return Comparison(tuple(lines), tuple(failures))

    threshold = None if info.task.threshold is None else 0.0  # all classes
    same, ties, different = 0, 0, []
    pixels = 0.0
    for prediction, wanted in zip(run.classify(images.files, None, threshold), images.inputs, strict=True):
        if prediction.error:
            continue
        inputs = torch.from_numpy(prepare(prediction.image, rules).copy())
        deviation = (inputs - wanted).abs() * torch.tensor(info.std)[:, None, None] * info.full_scale
        pixels = max(pixels, float(deviation.max()))
        said = info.classes[int(_logits(exported, inputs[None]).argmax())]
        chances = dict(zip(prediction.classes, prediction.probabilities, strict=True))
        if said == prediction.classes[0]:
            same += 1
        elif prediction.probabilities[0] - chances[said] < TIE:
            ties += 1
        else:
            different.append(f"{prediction.image} ({prediction.classes[0]} by predict, {said} here)")
    count = same + ties + len(different)
    tied = f", and {ties} where predict's two best classes are within {TIE:.0%}" if ties else ""
    lines.append(
        f"from files by preprocess.json: the same class as predict for {same} of {count} images{tied}; "
        f"pixels differ by at most {pixels:.1f} of 255"
    )
    if different:
        shown = ", ".join(different[:3]) + (" …" if len(different) > 3 else "")
        failures.append(f"from files {len(different)} of {count} images get another class than by predict: {shown}")
    return Comparison(tuple(lines), tuple(failures))


def _logits(model: Loaded | nn.Module, inputs: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(batch).float() for batch in torch.split(inputs, BATCH)])
