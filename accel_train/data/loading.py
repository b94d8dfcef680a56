"""From a draw of samples to a batch of tensors: the data set and the loaders that Accelerate prepares."""

from __future__ import annotations

import atexit
import dataclasses
import multiprocessing.util
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from accel_train import models
from accel_train.config import Augment, Config
from accel_train.cores import available_cores
from accel_train.data.augment import BatchTransform
from accel_train.data.keyed import hashed, key
from accel_train.data.order import Draw, EvaluationOrder, TrainingOrder
from accel_train.data.sources import Source, Splits
from accel_train.data.transform import ImageTransform
from accel_train.errors import UserError


def transforms_each_image(source: Source, augment: Augment, *, training: bool) -> bool:
    """Whether images must be turned one by one, by transform.py, before they make a batch."""
    return not source.in_memory or (training and (augment.crop == "resized" or augment.policy != "none"))


class BatchedSet(Dataset[dict[str, Tensor]]):
    """Fetches a whole draw at once. Holds no state: epoch and keys come with each draw, so that a worker process
    that outlives an epoch never works with the last one's."""

    def __init__(self, source: Source, transform: ImageTransform | None, seed: int) -> None:
        self.source = source
        self.transform = transform
        self.seed = seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, draw: Draw) -> dict[str, Tensor] | UserError:
        """images uint8 [b, C, H, W]; labels, ids and keys int64 [b]; weights float32 [b].

        An unreadable image's error is handed out in place of the batch: raised in a worker process, it would reach
        the user wrapped in torch's traceback.
        """
        try:
            return self._fetch(draw)
        except UserError as error:
            return error

    def _fetch(self, draw: Draw) -> dict[str, Tensor]:
        keys = hashed(key(self.seed, draw.epoch, "augment"), draw.ids)
        images = self.source.fetch(draw.ids.tolist())
        if self.transform is not None:
            images = self.transform(list(images), keys)
        assert isinstance(images, Tensor), "images of different sizes need an ImageTransform"
        return {
            "images": images,
            "labels": self.source.labels[draw.ids],
            "ids": draw.ids,
            "keys": keys,
            "weights": draw.weights,
        }


def create_loader(
    source: Source,
    order: TrainingOrder | EvaluationOrder,
    augment: Augment,
    *,
    size: int,
    seed: int,
    workers: int | None,
    local_processes: int,
    device: torch.device,
) -> DataLoader[dict[str, Tensor]]:
    """The loader of one split, to be prepared by Accelerate (which slices the order's batches for the processes).

    `size`: of the model's input, in pixels; `workers`: None chooses none for what is in memory, else this
    process's share of the cores; `local_processes`: training processes of this machine.
    """
    training = isinstance(order, TrainingOrder)
    each = transforms_each_image(source, augment, training=training)
    if workers is None:
        workers = max(1, available_cores() // local_processes) if each else 0
    if source.in_memory:  # as augment.py does: evaluation and training see the images at the same scale
        augment = dataclasses.replace(augment, resize=augment.resize or size)
    return DataLoader(
        BatchedSet(source, ImageTransform(augment, size, training=training) if each else None, seed),
        batch_sampler=order,  # type: ignore[arg-type]  # a Draw stands for a list of indices
        collate_fn=_as_it_is,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
        worker_init_fn=_leave_signals_to_the_trainer if workers else None,
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _leave_signals_to_the_trainer(_worker: int) -> None:
    # A stop signal goes to every process of a job. The trainer answers it with a checkpoint, for which it still
    # needs its workers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _end_workers() -> None:
    """At the interpreter's end: multiprocessing would send what is left of them SIGTERM, and wait for ever."""
    workers = [child for child in multiprocessing.active_children() if child.daemon]
    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would call them crashed
    for worker in workers:
        worker.kill()


atexit.register(_end_workers)  # what is registered last runs first: before multiprocessing.util's, imported above


@dataclass(frozen=True)
class Feed:
    """One split on its way into the model."""

    loader: DataLoader[dict[str, Tensor]]  # prepared by Accelerate: this process's slices, on its device
    transform: BatchTransform
    samples: int  # of the split, on all processes

    @property
    def batches(self) -> Iterator[dict[str, Tensor]]:
        """One pass over the loader; raises the UserError of an image that cannot be read."""
        for batch in self.loader:
            if isinstance(batch, UserError):
                raise batch
            yield batch


def create_feed(
    config: Config,
    splits: Splits,
    source: Source,
    order: TrainingOrder | EvaluationOrder,
    accelerator: Accelerator,
    *,
    size: int,
) -> Feed:
    """The prepared loader of `source` and what the device does to its batches; `size` is of the model's input.

    Raises UserError if the settings of `config.augment` do not fit the images or the input.
    """
    training = isinstance(order, TrainingOrder)
    if config.augment.resize is not None and config.augment.resize < size:
        raise UserError(
            f"--augment.resize: found {config.augment.resize}; the model's input has {size}: {size} or more."
        )
    mean, std = normalization(config, splits)
    loader = create_loader(
        source,
        order,
        config.augment,
        size=size,
        seed=config.seed,
        workers=config.data.workers,
        local_processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        device=accelerator.device,
    )
    transform = BatchTransform(
        config.augment,
        size=size,
        mean=mean,
        std=std,
        num_classes=len(splits.classes),
        training=training,
        per_image=transforms_each_image(source, config.augment, training=training),
        device=accelerator.device,
    )
    return Feed(accelerator.prepare_data_loader(loader), transform, len(source))


def normalization(config: Config, splits: Splits) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel: as configured, else the published weights', else the data's."""
    for name, values in (("mean", config.augment.mean), ("std", config.augment.std)):
        if values is not None and len(values) != splits.channels:
            raise UserError(
                f"--augment.{name}: found {len(values)} values; the images have {splits.channels} channels."
            )
    mean, std = models.pretrained_normalization(config.model) or (splits.mean, splits.std)
    if len(mean) != splits.channels:  # published weights of colour images, fed with grey ones
        mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)
    return config.augment.mean or mean, config.augment.std or std
