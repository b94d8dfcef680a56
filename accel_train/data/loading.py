"""From a draw of samples to a batch of tensors: the data set and the loaders that Accelerate prepares."""

from __future__ import annotations

import atexit
import dataclasses
import multiprocessing.util
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from accel_train import models
from accel_train.config.schema import Augment, Config
from accel_train.data.memory import MemoryLoader
from accel_train.data.order.keyed import hashed, key
from accel_train.data.order.samplers import Draw, Order
from accel_train.data.placement import Placement, choose_place
from accel_train.data.sources.encoded import EncodedImages
from accel_train.data.sources.splits import Source, Splits, owner
from accel_train.data.transforms.batch import BatchTransform
from accel_train.data.transforms.device_decoding import DeviceDecoder, Reading, Undecoded, check_device_decoding
from accel_train.data.transforms.image import ImageTransform, resize_default
from accel_train.errors import UserError
from accel_train.launch.process import available_cores


def transforms_each_image(source: Source, augment: Augment, *, training: bool) -> bool:
    """Whether images must be turned one by one, by transform.py, before they make a batch."""
    return not source.in_memory or (training and (augment.crop == "resized" or augment.policy != "none"))


class BatchedSet(Dataset[dict[str, Any]]):
    """Fetches a whole draw at once. Holds no state: epoch and keys come with each draw, so that a worker process
    that outlives an epoch never works with the last one's."""

    def __init__(self, source: Source, transform: ImageTransform | Reading | None, seed: int) -> None:
        self.source = source
        self.held, self.held_ids = owner(source)
        self.transform = transform
        self.seed = seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, draw: Draw) -> dict[str, Any] | UserError:
        """images uint8 [b, C, H, W], or yet Undecoded; labels, ids and keys int64 [b]; weights float32 [b].

        An unreadable image's error is handed out in place of the batch: raised in a worker process, it would reach
        the user wrapped in torch's traceback.
        """
        try:
            return self._fetch(draw)
        except UserError as error:
            return error

    def _fetch(self, draw: Draw) -> dict[str, Any]:
        keys = hashed(key(self.seed, draw.epoch, "augment"), draw.ids)
        images: Tensor | Sequence[Tensor] | Undecoded
        if self.transform is None:
            images = self.source.fetch(draw.ids.tolist())
        elif isinstance(self.held, EncodedImages):  # what is not needed of an image is not decoded
            ids = draw.ids if self.held_ids is None else self.held_ids[draw.ids]
            images = self.transform([self.held.open(id) for id in ids.tolist()], keys)
        else:
            assert isinstance(self.transform, ImageTransform)
            images = self.transform(list(self.source.fetch(draw.ids.tolist())), keys)
        assert isinstance(images, Tensor | Undecoded), "images of different sizes need an ImageTransform"
        return {
            "images": images,
            "labels": self.source.labels[draw.ids],
            "ids": draw.ids,
            "keys": keys,
            "weights": draw.weights,
        }


def create_loader(
    source: Source,
    order: Order,
    augment: Augment,
    *,
    training: bool,
    size: int,
    seed: int,
    workers: int | None,
    local_processes: int,
    device: torch.device,
    decode_on: Literal["host", "device"] = "host",
    reduced_decode: bool = True,
) -> DataLoader[dict[str, Tensor]]:
    """The loader of one split, to be prepared by Accelerate (which slices the order's batches for the processes).

    `training`: whether images are augmented; `size`: of the model's input, in pixels; `workers`: None chooses none for
    what is in memory, else this process's share of the cores, on a GPU but for one; `local_processes`: training
    processes of this machine.
    """
    each = transforms_each_image(source, augment, training=training)
    if workers is None:
        spare = device.type != "cpu"  # a core for the thread that tells the device what to do
        workers = max(1, available_cores() // local_processes - spare) if each else 0
    if source.in_memory:  # as augment.py does: evaluation and training see the images at the same scale
        augment = dataclasses.replace(augment, resize=augment.resize or size)
    transform: ImageTransform | Reading | None = None
    if each and decode_on == "device":
        transform = Reading(augment, size, training=training)
    elif each:
        transform = ImageTransform(augment, size, training=training, reduces=reduced_decode)
    return DataLoader(
        BatchedSet(source, transform, seed),
        batch_sampler=order,  # type: ignore[arg-type]  # a Draw stands for a list of indices
        collate_fn=_as_it_is,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        # Those of an evaluation end with it: they and training's, which wait meanwhile, have the same cores.
        persistent_workers=training and workers > 0,
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


class Loader(Protocol):
    """This process's slices of the micro-batches, on its device: Accelerate's, or that of a set in memory."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]: ...

    def end(self) -> None:
        """To be called if a pass was left in its middle."""


@dataclass(frozen=True)
class Feed:
    """One split on its way into the model."""

    loader: Loader
    transform: BatchTransform
    samples: int  # of the split, on all processes
    placement: Placement
    decoder: DeviceDecoder | None = None

    @property
    def batches(self) -> Iterator[dict[str, Tensor]]:
        """One pass over the loader; raises the UserError of an image that cannot be read."""
        for batch in self.loader:
            if isinstance(batch, UserError):
                raise batch
            if self.decoder is not None:
                batch["images"] = self.decoder(cast(Undecoded, batch["images"]), batch["ids"])
            yield batch


def create_feed(
    config: Config,
    splits: Splits,
    source: Source,
    order: Order,
    accelerator: Accelerator,
    *,
    training: bool,
    size: int,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Feed:
    """The loader of `source` and what the device does to its batches: augmentation if `training`. `size` and
    `memory_format` are of the model's input. To be called on all processes at once, for they agree where the images are
    to lie.

    Raises UserError if the settings of `config.augment` do not fit the images or the input, or if they cannot lie
    where `config.data.placement` says.
    """
    if config.augment.resize is not None and config.augment.resize < size:
        raise UserError(
            f"--augment.resize: found {config.augment.resize}; the model's input has {size}: {size} or more."
        )
    mean, std = normalization(config, splits)
    device = accelerator.device
    if training and config.augment.crop == "random" and config.augment.pad_mode == "reflect":
        short = config.augment.resize or (size if source.in_memory else resize_default(size))
        if config.augment.pad >= short:
            raise UserError(
                f"--augment.pad: found {config.augment.pad}; an image of {short} pixels reflects less than {short}."
            )
    each = transforms_each_image(source, config.augment, training=training)
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    place, size_bytes = choose_place(config.data, source, accelerator, per_image=each, local_processes=local_processes)
    decoder = None
    if config.data.decode_on == "device":
        check_device_decoding(source, config.augment, device, training=training)
        decoder = DeviceDecoder(source, size=size, channels=splits.channels, device=device)
    loader: Loader
    if place == "disk" or each:
        made = create_loader(
            source,
            order,
            config.augment,
            training=training,
            size=size,
            seed=config.seed,
            workers=config.data.workers,
            local_processes=local_processes,
            device=device,
            decode_on=config.data.decode_on,
            reduced_decode=config.data.reduced_decode,
        )
        workers, ahead = made.num_workers, made.prefetch_factor or 0
        loader = accelerator.prepare_data_loader(made)
    else:
        workers = ahead = 0
        loader = MemoryLoader(
            source,
            order,
            seed=config.seed,
            process=accelerator.process_index,
            processes=accelerator.num_processes,
            device=device,
            pixels_device=device if place == "device" else torch.device("cpu"),
            memory_format=memory_format,
        )
    transform = BatchTransform(
        config.augment,
        size=size,
        mean=mean,
        std=std,
        num_classes=len(splits.classes),
        training=training,
        per_image=each,
        device=device,
        memory_format=memory_format,
    )
    placement = Placement(place, size_bytes, workers, ahead, config.data.decode_on)
    return Feed(loader, transform, len(source), placement, decoder)


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
