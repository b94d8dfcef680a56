"""`accel-train preview RECIPE`: one picture with the images that a model will see, as it will see them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor

from accel_train import models
from accel_train.config.schema import Augment, Config
from accel_train.data.loading import create_input_pipeline
from accel_train.data.order import IndexBatch, IndexSampler
from accel_train.data.sources.splits import Source, Splits
from accel_train.errors import UserError, writing
from accel_train.files import atomic_replacement, check_writable
from accel_train.launch.environment import Launch
from accel_train.records.model_info import ModelInfo
from accel_train.records.summary import model_info_of
from accel_train.run.start import find_start, load_data
from accel_train.tools.load_run import Preprocessing
from accel_train.tools.report.curves import import_pyplot
from accel_train.tools.report.report import image_of_input, input_image
from accel_train.training_setup import connect

VIEWS = 3
"""How often each training image is shown with its augmentation."""
INCHES = 1.6  # of an image with its title

Picture = tuple[Image.Image, str]
"""An image and its label."""


@dataclass(frozen=True)
class Augmented:
    """A training image, each time that the model saw it."""

    name: str
    views: list[Picture]


@dataclass(frozen=True)
class PreviewResult:
    """A picture that was written."""

    path: Path
    training: tuple[Augmented, ...]
    """The images of the training that it shows."""


def preview(launch: Launch, config: Config, output: Path, *, images: int = 8) -> PreviewResult:
    """Write a PNG: a row for each of `images` training images, plain and augmented as in the first epochs, and a row of
    images of each other split as an evaluation sees them, all with their labels.

    The images are drawn at random, always the same. Nothing is trained, and no model is made. Raises UserError.
    """
    launch.check_alone("preview")
    if images < 1:
        raise UserError(f"images: expected at least 1, found {images}.")
    import_pyplot()  # its absence is told before the work
    check_writable("--output", output)
    config = dataclasses.replace(config, resume="auto", output_dir=None, trackers=())
    accelerator = connect(config, launch)
    config = find_start(config, accelerator).config
    splits = load_data(config, accelerator)
    info = model_info_of(config, splits, models.input_size(config.model, splits.image_size, config.origin))
    training = augmented_pictures(splits, info, config, accelerator, samples=images, times=VIEWS)
    kept = {name: getattr(config.augment, name) for name in ("resize", "interpolation", "mean", "std")}
    without = dataclasses.replace(config, augment=Augment(**kept))
    plain = augmented_pictures(splits, info, without, accelerator, samples=images, times=1)
    rows = [("train", [before.views[0], *after.views]) for before, after in zip(plain, training, strict=True)]
    for split, source in (("val", splits.validation), ("test", splits.test)):
        if source is not None:
            rows.append((split, _evaluated(source, splits, info, config)))
    with writing("--output", output), atomic_replacement(output) as temporary:
        _draw(rows, temporary)
    return PreviewResult(output, tuple(training))


def _evaluated(source: Source, splits: Splits, info: ModelInfo, config: Config) -> list[Picture]:
    """Some images of a split as the evaluation shows them to the model; those that cannot be read are left out."""
    preprocessing, pictures = Preprocessing(info, config.augment), list[Picture]()
    for id in np.random.default_rng(0).permutation(len(source))[: 1 + VIEWS].tolist():
        with contextlib.suppress(UserError):
            label = label_text(source.labels[id], splits.classes)
            pictures.append((input_image(source, id, preprocessing, info), label))
    return pictures


def _draw(rows: list[tuple[str, list[Picture]]], path: Path) -> None:
    """A grid of images under their labels. The first column of training images is without augmentation."""
    pyplot = import_pyplot()
    size = ((1 + VIEWS) * INCHES, len(rows) * INCHES)
    figure, grid = pyplot.subplots(len(rows), 1 + VIEWS, figsize=size, squeeze=False, layout="constrained")
    for (split, pictures), axes in zip(rows, grid, strict=True):
        for number, axis in enumerate(axes):
            axis.set_axis_off()
            if number < len(pictures):
                image, label = pictures[number]
                axis.imshow(np.asarray(image), cmap="gray", vmin=0, vmax=255)
                plain = " (plain)" if split == "train" and number == 0 else ""
                axis.set_title(f"{split}{plain}: {label}"[:40], fontsize=6, parse_math=False)
    figure.savefig(path, format="png", dpi=150)
    pyplot.close(figure)


def augmented_pictures(
    splits: Splits, info: ModelInfo, config: Config, accelerator: Accelerator, *, samples: int, times: int
) -> list[Augmented]:
    """`samples` training images, drawn at random but always the same, each as the first epochs show it, `times` times.

    The random parameters are those of these epochs. With mixup and CutMix two neighbours in an update are mixed;
    here, two of the images shown. Raises UserError if an image cannot be read.
    """
    source = splits.train
    readable = np.arange(len(source)) if splits.unreadable is None else (~splits.unreadable).nonzero()[:, 0].numpy()
    chosen = np.random.default_rng(0).choice(readable, min(samples, len(readable)), replace=False)
    ids = torch.from_numpy(np.resize(chosen, len(chosen) + len(chosen) % 2)).long()  # mixing takes pairs
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, workers=0))
    sampler, size = ChosenSampler(ids, times), info.training_size
    pipeline = create_input_pipeline(config, splits, source, sampler, accelerator, training=True, size=size)
    views: list[list[Picture]] = [[] for _ in chosen]
    for batch in pipeline.batches:
        inputs, targets = (values.cpu() for values in pipeline.transform(batch))
        for number, seen in enumerate(views):
            seen.append((image_of_input(inputs[number], info), label_text(targets[number], splits.classes)))
    return [Augmented(source.name(int(id)), seen) for id, seen in zip(chosen, views, strict=True)]


class ChosenSampler(IndexSampler):
    """Yields the samples `ids` (int64 [n]) as one batch in each of the first epochs."""

    def __init__(self, ids: Tensor, epochs: int) -> None:
        self.ids, self.epochs, self.batch_size = ids, epochs, len(ids)

    def __len__(self) -> int:
        return self.epochs

    def blocks(self) -> Iterator[IndexBatch]:
        for epoch in range(self.epochs):
            yield IndexBatch(epoch, self.ids, torch.ones(len(self.ids)))


def label_text(target: Tensor, classes: tuple[str, ...]) -> str:
    """The classes of a target: int64 [], or the share of each class, float32 [classes]: "cat 70%, dog 30%". What
    rounds to nothing is left out."""
    if target.ndim == 0:
        return classes[int(target)]
    shares = [(round(100 * share), label) for label, share in enumerate(target.tolist())]
    shown = sorted((entry for entry in shares if entry[0]), key=lambda entry: (-entry[0], entry[1]))
    return ", ".join(classes[label] + (f" {share}%" if share < 100 else "") for share, label in shown) or "none"
