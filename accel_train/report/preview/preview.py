"""`accel-train preview RECIPE`: the images that a model will see, as it will see them."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from accel_train import models
from accel_train.analysis.inference.preprocessing import Preprocessing
from accel_train.config.schema import Augment, Config
from accel_train.data.sources.splits import Source, Splits
from accel_train.errors import UserError, counted, first_of, writing
from accel_train.files import atomic_write
from accel_train.launch.environment import Launch
from accel_train.records.model_info import ModelInfo
from accel_train.records.summary import data_record, model_info_of
from accel_train.report.one_run.augmented import Augmented, augmented_pictures, label_text
from accel_train.report.shared.images import input_uri
from accel_train.report.shared.render import check_page, render
from accel_train.run.start import find_start, load_data
from accel_train.training_setup import connect

VIEWS = 3
"""How often each training image is shown with its augmentation."""
EVALUATED = 12
"""Images of each other split."""


@dataclass(frozen=True)
class Picture:
    """An image as an evaluation sees it."""

    name: str
    uri: str
    label: str


@dataclass(frozen=True)
class PreviewResult:
    """A page that was written."""

    path: Path
    training: tuple[Augmented, ...]
    """The images of the training that it shows."""


def preview(launch: Launch, config: Config, output: Path, *, images: int = 12) -> PreviewResult:
    """Write a page with `images` images of the training, each augmented three times, and some of the evaluation.

    The images are drawn at random, always the same. They are those of the first epochs: the same crops, flips and
    colours. Nothing is trained, and no model is made. Raises UserError.
    """
    launch.check_alone("preview")
    if images < 1:
        raise UserError(f"images: expected at least 1, found {images}.")
    check_page("--output", output)
    config = dataclasses.replace(config, resume="never", trackers=())
    accelerator = connect(config, launch)
    config = find_start(config, accelerator).config
    splits = load_data(config, accelerator)
    info = model_info_of(config, splits, models.input_size(config.model, splits.image_size, config.origin))
    training = augmented_pictures(splits, info, config, samples=images, times=VIEWS)
    plain = _plain(splits, info, config, images)
    page = render(
        "report/preview/preview.html",
        title=f"{config.recipe}: what the model sees",
        facts=_facts(config, splits, info),
        counts=_counts(splits),
        mixes=config.augment.mixes,
        training=[(each, without.views[0]) for each, without in zip(training, plain, strict=True)],
        held_out=[
            (split, _evaluated(source, splits, info, config))
            for split, source in (("val", splits.validation), ("test", splits.test))
            if source is not None
        ],
    )
    with writing("--output", output):
        atomic_write(output, page)
    return PreviewResult(output, tuple(training))


def _plain(splits: Splits, info: ModelInfo, config: Config, images: int) -> list[Augmented]:
    """The same images without augmentation."""
    kept = {name: getattr(config.augment, name) for name in ("resize", "interpolation", "mean", "std")}
    return augmented_pictures(
        splits, info, dataclasses.replace(config, augment=Augment(**kept)), samples=images, times=1
    )


def _evaluated(source: Source, splits: Splits, info: ModelInfo, config: Config) -> list[Picture]:
    """Some images of a split as the evaluation shows them to the model; those that cannot be read are left out."""
    preprocessing, pictures = Preprocessing(info, config.augment), list[Picture]()
    for id in np.random.default_rng(0).permutation(len(source))[:EVALUATED].tolist():
        with contextlib.suppress(UserError):
            uri = input_uri(source, id, preprocessing, info)
            pictures.append(Picture(source.name(id), uri, label_text(source.labels[id], splits.classes)))
    return pictures


def _facts(config: Config, splits: Splits, info: ModelInfo) -> list[tuple[str, str]]:
    """What decides what the model sees."""
    default, size = Augment(), f"{info.training_size} x {info.training_size}"
    changed = [
        f"{name.replace('_', '-')} {value}"
        for name, value in dataclasses.asdict(config.augment).items()
        if value != getattr(default, name)
    ]
    return [
        ("data", f"{config.data.name}, {config.data.root}"),
        ("classes", f"{len(splits.classes)}: {first_of(splits.classes, 10)}"),
        ("input", f"{size} pixels, {counted(info.channels, 'channel')}"),
        ("mean", ", ".join(f"{value:.4g}" for value in info.mean)),
        ("std", ", ".join(f"{value:.4g}" for value in info.std)),
        ("augmentation", ", ".join(changed) or "none"),
    ]


def _counts(splits: Splits) -> list[tuple[str, str]]:
    """How many images each split has, and its smallest and its largest class."""
    rows = []
    for split, record in data_record(splits).items():
        if isinstance(record, dict):
            sizes = record["class_images"]
            least, most = (pick(range(len(sizes)), key=sizes.__getitem__) for pick in (min, max))
            text = f"{record['images']:,} images; "
            text += f"{sizes[least]:,} of {splits.classes[least]} to {sizes[most]:,} of {splits.classes[most]}"
            rows.append((split, text))
    return rows
