"""The loader of a split, without a recipe."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from accel_train.config.schema import Augment
from accel_train.data.batch_transform import BatchTransform, transforms_each_image
from accel_train.data.loading import create_loader
from accel_train.data.order import IndexSampler
from accel_train.data.sources.splits import Source, has_one_size


def loader_of(
    source: Source, sampler: IndexSampler, augment: Augment, *, training: bool = True, size: int = 8, **options: Any
) -> DataLoader[Any]:
    """Of images with three channels. `options`: as `create_loader` has them."""
    per_image = transforms_each_image(has_one_size(source), augment, training=training)
    cpu = torch.device("cpu")
    transform = BatchTransform(
        augment, size=size, mean=(0.0,) * 3, std=(1.0,) * 3, num_classes=10, training=training, per_image=per_image,
        device=cpu,
    )  # fmt: skip
    return create_loader(source, sampler, transform, **{"seed": 0, "workers": 0, "device": cpu, **options})
