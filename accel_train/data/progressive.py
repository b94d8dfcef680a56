"""Training images that grow with the epochs: model.progressive_sizes in the first ones, then the input's size.

An update with smaller images takes less time (progressive learning: Tan and Le 2021, EfficientNetV2,
https://arxiv.org/abs/2104.00298). The size is a function of the epoch alone, so it is the same on any number of
processes, and after a restart or a rewind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from accel_train.config.schema import Augment, Config, Model
from accel_train.data.transforms.batch import BatchTransform
from accel_train.errors import UserError


class Pipeline(Protocol):
    """What depends on the size in an InputPipeline (loading.py)."""

    loader: Any
    transform: BatchTransform


class Create(Protocol):
    """Creates a pipeline of the training images with another size; those in memory are the same as those of `like`."""

    def __call__(self, config: Config, *, size: int, like: Any) -> Pipeline: ...


class ProgressiveInput:
    """The training's input pipeline, whose size changes where an epoch with another one begins."""

    def __init__(self, config: Config, pipeline: Pipeline, create: Create) -> None:
        """`pipeline`: the training's, with the size of the last epochs. Collective.

        What the other sizes need is created now, so that a mistake is told before the first epoch: loaders, which start
        their workers when they are used, and transforms. Raises UserError.
        """
        self._model, self._pipeline, self.size = config.model, pipeline, pipeline.transform.size
        check_sizes(config.model, self.size)
        self._of_size = {self.size: (pipeline.loader, pipeline.transform)}
        for size in config.model.progressive_sizes:
            smaller = replace(config, augment=augment_of_size(config.augment, size, self.size))
            other = create(smaller, size=size, like=pipeline)
            self._of_size[size] = other.loader, other.transform

    def begin_epoch(self, epoch: int) -> int | None:
        """Give the pipeline the size of `epoch`, from 0 on: returned if it is another one than before, else None."""
        size = size_of_epoch(self._model, self.size, epoch)
        if size == self._pipeline.transform.size:
            return None
        self._pipeline.loader, self._pipeline.transform = self._of_size[size]
        return size


def size_of_epoch(model: Model, size: int, epoch: int) -> int:
    """Height and width, in pixels, of the training images in `epoch`, from 0 on; `size`: of the last epochs."""
    ends = zip(model.progressive_sizes, model.progressive_epochs, strict=True)
    return next((smaller for smaller, end in ends if epoch < end), size)


def check_sizes(model: Model, size: int) -> None:
    """Raise UserError unless all model.progressive_sizes are below `size`, the input's height and width."""
    if model.progressive_sizes and model.progressive_sizes[-1] >= size:
        raise UserError(
            f"--model.progressive-sizes: found {model.progressive_sizes[-1]}, but the images of the last epochs have "
            f"{size} pixels (--model.image-size); give smaller sizes."
        )


def augment_of_size(augment: Augment, smaller: int, size: int) -> Augment:
    """The options for images of `smaller` pixels, if `augment` is for `size`: a crop shows the same part of an image.

    augment.pad is a number of pixels at any size.
    """
    return augment if augment.resize is None else replace(augment, resize=round(augment.resize * smaller / size))
