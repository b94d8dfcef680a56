"""Real images of a run's data, with which an export is compared with the run."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from accel_train.analysis.load_run import data_of_run
from accel_train.analysis.loaded_run import LoadedRun
from accel_train.data.sources.files.depth import is_deep
from accel_train.data.sources.splits import Source
from accel_train.errors import UserError
from accel_train.records.result import FOLDER
from accel_train.user_code.reference import short_name

COUNT = 64


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

    Without the data here, those of RUN/examples; without these, random inputs. Images that are not in files of their
    own are written into `folder`.
    """
    try:
        _, splits = data_of_run(run.path, trust_code=trust_code)
        chosen = {"test": splits.test, "validation": splits.validation, "training": splits.to_train_on}
        split, source = next((split, source) for split, source in chosen.items() if source)
        name = f"{short_name('data.name', run.config.data.name)} ({split} split)"
        return _of_source(name, source, run, folder)
    except UserError as error:
        return _of_examples(run, str(error).partition(";")[0].rstrip("."))


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
            if not opened.mode.startswith("I") and not is_deep(opened):
                return file
    Image.fromarray(pixels.permute(1, 2, 0).squeeze(2).contiguous().numpy()).save(new)
    return new


def _of_examples(run: LoadedRun, reason: str) -> Images:
    files, inputs = [], []
    folder, info = run.path / FOLDER, run.info
    for file in sorted(folder.glob("*.png")) if info.takes_files else ():
        with contextlib.suppress(UserError):
            inputs.append(run.transform(file))
            files.append(file)
    if files:
        return Images(f"{len(files)} images of {folder} ({reason})", torch.stack(inputs), tuple(files))
    random = torch.randn(8, info.channels, info.image_size, info.image_size, generator=torch.Generator().manual_seed(0))
    return Images(f"8 random inputs ({reason})", random, ())
