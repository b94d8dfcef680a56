"""From a draw of samples to a batch of tensors: the data set and the loaders that Accelerate prepares."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.utils.data import DataLoader

from accel_train import models
from accel_train.config.schema import Augment, Config
from accel_train.data.memory import MemoryLoader
from accel_train.data.order.samplers import Order
from accel_train.data.placement import Placement, choose_place
from accel_train.data.side_stream import SideStream
from accel_train.data.sources.load import IN_MEMORY
from accel_train.data.sources.splits import Source, Splits
from accel_train.data.transforms.batch import BatchTransform
from accel_train.data.transforms.device_decoding import DeviceDecoder, Reading, Undecoded, check_device_decoding
from accel_train.data.transforms.image import ImageTransform, resize_default
from accel_train.data.transforms.parameters import AugmentParameters
from accel_train.data.workers import BatchedSet, Beginning, WorkerContext, as_it_is, start_server
from accel_train.errors import UserError
from accel_train.launch.process import core_set, hostname, share_of_cores


def transforms_each_image(source: Source, augment: Augment, *, training: bool) -> bool:
    """Whether images must be turned one by one, by transform.py, before they make a batch."""
    return not source.in_memory or (training and (augment.crop == "resized" or augment.policy != "none"))


def start_workers_early(config: Config) -> None:
    """If the configuration needs data workers, start what they are forked from: while data and model are prepared it
    imports torch."""
    in_memory = config.data.name.removeprefix("torch/") in IN_MEMORY
    each = not in_memory or config.augment.crop == "resized" or config.augment.policy != "none"
    if each and config.data.workers != 0:
        start_server()


def create_loader(
    source: Source,
    order: Order,
    augment: Augment,
    *,
    training: bool,
    size: int,
    seed: int,
    workers: int | None,
    device: torch.device,
    cores: int = 1,
    decode_on: Literal["host", "device"] = "host",
    reduced_decode: bool = True,
    draws: AugmentParameters | None = None,
) -> DataLoader[dict[str, Tensor]]:
    """The loader of one split, to be prepared by Accelerate (which slices the order's batches for the processes).

    `training`: whether images are augmented; `size`: of the model's input, in pixels; `workers`: None chooses none for
    what is in memory, else as many as this process has `cores`, on a GPU but for one; `draws`: of the BatchTransform
    that takes the batches.
    """
    each = transforms_each_image(source, augment, training=training)
    if workers is None:
        spare = device.type != "cpu"  # a core for the thread that tells the device what to do
        workers = max(1, cores - spare) if each else 0
    if source.in_memory:  # as augment.py does: evaluation and training see the images at the same scale
        augment = dataclasses.replace(augment, resize=augment.resize or size)
    transform: ImageTransform | Reading | None = None
    if each and decode_on == "device":
        transform = Reading(augment, size, training=training)
    elif each:
        transform = ImageTransform(augment, size, training=training, reduces=reduced_decode)
    return DataLoader(
        BatchedSet(source, transform, seed, draws),
        batch_sampler=order,  # type: ignore[arg-type]  # a Draw stands for a list of indices
        collate_fn=as_it_is,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        # Those of an evaluation end with it: they and training's, which wait meanwhile, have the same cores.
        persistent_workers=training and workers > 0,
        worker_init_fn=Beginning() if workers else None,
        multiprocessing_context=WorkerContext() if workers else None,
    )


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
    side: SideStream | None = None

    @property
    def batches(self) -> Iterator[dict[str, Tensor]]:
        """One pass over the loader; raises the UserError of an image that cannot be read."""
        for batch in self.loader if self.side is None else self.side.copied(self.loader):
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
    _check_sizes(config.augment, source, size, training=training)
    mean, std = normalization(config, splits)
    device = accelerator.device
    each = transforms_each_image(source, config.augment, training=training)
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    place, size_bytes = choose_place(config.data, source, accelerator, per_image=each, local_processes=local_processes)
    decoder = None
    if config.data.decode_on == "device":
        check_device_decoding(source, config.augment, device, training=training)
        decoder = DeviceDecoder(source, size=size, channels=splits.channels, device=device)
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
            device=device,
            cores=_cores(accelerator) if config.data.workers is None else 1,
            decode_on=config.data.decode_on,
            reduced_decode=config.data.reduced_decode,
            draws=transform.draws,
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
            draws=transform.draws,
        )
    placement = Placement(place, size_bytes, workers, ahead, config.data.decode_on)
    side = SideStream(device) if device.type == "cuda" and place != "device" else None
    return Feed(loader, transform, len(source), placement, decoder, side)


def _check_sizes(augment: Augment, source: Source, size: int, *, training: bool) -> None:
    """Raise UserError if the images are too small for what `augment` asks for."""
    if augment.resize is not None and augment.resize < size:
        raise UserError(f"--augment.resize: found {augment.resize}; the model's input has {size}: {size} or more.")
    if training and augment.crop == "random" and augment.pad_mode == "reflect":
        short = augment.resize or (size if source.in_memory else resize_default(size))
        if augment.pad >= short:
            raise UserError(
                f"--augment.pad: found {augment.pad}; an image of {short} pixels reflects less than {short}."
            )


def _cores(accelerator: Accelerator) -> int:
    """This process's share of the host's cores. All processes must call it: they tell each other which they may use,
    for Slurm and MPI may or may not have bound each to cores of its own."""
    mine = core_set()
    if accelerator.num_processes == 1:
        return len(mine)
    everyone = gather_object([(hostname(), mine)])
    return share_of_cores(mine, [cores for host, cores in everyone if host == hostname()])


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
