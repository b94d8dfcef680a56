"""Training images that grow with the epochs: model.progressive_sizes in the first ones, then the input's size.

An update with smaller images takes less time (progressive learning: Tan and Le 2021, EfficientNetV2,
https://arxiv.org/abs/2104.00298). The size is a function of the epoch alone, so it is the same on any number of
processes, and after a restart or a rewind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from accel_train.config.schema import Config
from accel_train.data.transforms.batch import BatchTransform
from accel_train.errors import UserError


class Pipeline(Protocol):
    """What depends on the size in an InputPipeline (loading.py)."""

    loader: Any
    transform: BatchTransform


class ProgressiveInput:
    """The training's input pipeline, whose size changes where an epoch with another one begins."""

    def __init__(self, config: Config, pipeline: Pipeline, create: Callable[..., Pipeline]) -> None:
        """`pipeline`: the training's, with the size of the last epochs. `create(config, size=, like=)`: creates one of
        another size; its images in memory are those of `like`. Collective.

        What the other sizes need is created now, so that a mistake is told before the first epoch: loaders, which start
        their workers when they are used, and transforms. Raises UserError.
        """
        self._model, self._pipeline, self.size = config.model, pipeline, pipeline.transform.size
        if config.model.progressive_sizes[-1] >= self.size:
            raise UserError(
                f"--model.progressive-sizes: found {config.model.progressive_sizes[-1]}, but the images of the last "
                f"epochs have {self.size} pixels (--model.image-size); give smaller sizes."
            )
        self._of_size = {self.size: (pipeline.loader, pipeline.transform)}
        for size in config.model.progressive_sizes:
            augment = config.augment
            if augment.resize is not None:  # a crop shows the same part of an image; augment.pad stays as it is
                augment = replace(augment, resize=round(augment.resize * size / self.size))
            other = create(replace(config, augment=augment), size=size, like=pipeline)
            self._of_size[size] = other.loader, other.transform

    def begin_epoch(self, epoch: int) -> int | None:
        """Give the pipeline the size of `epoch`, from 0 on: returned if it is another one than before, else None."""
        ends = zip(self._model.progressive_sizes, self._model.progressive_epochs, strict=True)
        size = next((smaller for smaller, end in ends if epoch < end), self.size)
        if size == self._pipeline.transform.size:
            return None
        self._pipeline.loader, self._pipeline.transform = self._of_size[size]
        return size
