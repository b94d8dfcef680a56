"""Training images as the model saw them, with the augmentation of the run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from accel_train.config.schema import Config
from accel_train.data.loading import create_loader
from accel_train.data.order.samplers import IndexBatch
from accel_train.data.sources.splits import Splits, has_one_size
from accel_train.data.transforms.batch import BatchTransform
from accel_train.data.transforms.parameters import transforms_each_image
from accel_train.errors import UserError
from accel_train.records.model_info import ModelInfo
from accel_train.report.shared.images import image_uri

SAMPLES = 6
TIMES = 2


@dataclass(frozen=True)
class Augmented:
    """A training image, each time that the model saw it."""

    name: str
    views: list[tuple[str, str]]
    """(the image as a data: URI, its label) of each time: one if all are the same."""


def augmented_pictures(
    splits: Splits, info: ModelInfo, config: Config, *, samples: int = SAMPLES, times: int = TIMES
) -> list[Augmented]:
    """`samples` training images, drawn at random but always the same, each as the first epochs show it, `times` times;
    once if all are the same.

    The random parameters are those of these epochs. With mixup and CutMix two neighbours in an update are mixed;
    here, two of the images shown. Raises UserError if an image cannot be read.
    """
    source, augment, size = splits.train, config.augment, info.training_size
    per_image = transforms_each_image(has_one_size(source), augment, training=True)
    transform = BatchTransform(
        augment,
        size=size,
        mean=info.mean,
        std=info.std,
        full_scale=splits.full_scale,
        num_classes=len(splits.classes),
        training=True,
        per_image=per_image,
        device=torch.device("cpu"),
    )
    readable = np.arange(len(source)) if splits.unreadable is None else (~splits.unreadable).nonzero()[:, 0].numpy()
    chosen = np.random.default_rng(0).choice(readable, min(samples, len(readable)), replace=False)
    ids = torch.from_numpy(np.resize(chosen, len(chosen) + len(chosen) % 2)).long()  # mixing takes pairs
    batches = [IndexBatch(epoch, ids, torch.ones(len(ids))) for epoch in range(times)]
    loader = create_loader(
        source,
        batches,  # type: ignore[arg-type]  # a sampler only has to be iterable
        augment,
        training=True,
        size=size,
        seed=config.seed,
        workers=0,
        device=torch.device("cpu"),
        reduced_decode=config.data.reduced_decode,
        draw_parameters=transform.draw_parameters,
    )
    views: list[list[tuple[str, str]]] = [[] for _ in chosen]
    for batch in loader:
        if isinstance(batch, UserError):
            raise batch
        inputs, targets = transform(batch)
        for number, seen in enumerate(views):
            view = image_uri(inputs[number], info), label_text(targets[number], splits.classes)
            if view not in seen:
                seen.append(view)
    return [Augmented(source.name(int(id)), seen) for id, seen in zip(chosen, views, strict=True)]


def label_text(target: Tensor, classes: tuple[str, ...]) -> str:
    """The classes of a target: int64 [], or the share of each class, float32 [classes]: "cat 70%, dog 30%". What
    rounds to nothing is left out."""
    if target.ndim == 0:
        return classes[int(target)]
    shares = [(round(100 * share), label) for label, share in enumerate(target.tolist())]
    shown = sorted((entry for entry in shares if entry[0]), key=lambda entry: (-entry[0], entry[1]))
    return ", ".join(classes[label] + (f" {share}%" if share < 100 else "") for share, label in shown) or "none"
