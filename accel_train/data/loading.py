"""Input pipelines: from a sampler's index batches to batches of tensors on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from accel_train.config.groups.augment import check_channels, check_resize
from accel_train.config.schema import Augment, Config
from accel_train.data.memory import MemoryLoader, Place, Placement, choose_place
from accel_train.data.order.plan import Plan
from accel_train.data.order.samplers import EvaluationSampler, IndexSampler, TrainingSampler
from accel_train.data.sources.load import IN_MEMORY, resolve_mean_std
from accel_train.data.sources.splits import Source, Splits, has_one_size
from accel_train.data.transforms.batch import BatchTransform
from accel_train.data.transforms.parameters import resize_default, transforms_each_image
from accel_train.errors import UserError
from accel_train.launch.process import core_set, hostname, share_of_cores

if TYPE_CHECKING:
    from accel_train.data.side_stream import SideStream

# What `_cores` has returned. A run has an accelerator of its own and up to three pipelines; its entry ends with it.
_cores_of: WeakKeyDictionary[Accelerator, int] = WeakKeyDictionary()


def start_workers_early(config: Config) -> None:
    """If the configuration needs data workers, start the server process from which they are forked.

    It imports torch while this process prepares data and model.
    """
    in_memory = config.data.name.removeprefix("torch/") in IN_MEMORY
    if transforms_each_image(in_memory, config.augment, training=True) and config.data.workers != 0:
        from accel_train.data.worker_processes import WORKERS, start_server

        start_server(WORKERS)


class Loader(Protocol):
    """Yields this process's slices of the micro-batches, on its device: Accelerate's loader, or a MemoryLoader."""

    def __iter__(self) -> Iterator[dict[str, Any]]: ...

    def end(self) -> None:
        """To be called when a pass ends early."""


@dataclass
class InputPipeline:
    """Loads one split and transforms it into the model's input."""

    loader: Loader
    transform: BatchTransform
    samples: int  # of the split, over all processes
    placement: Placement
    side: SideStream | None = None
    multi_label: bool = False
    """Whether labels are bool [b, classes] instead of int64 [b]."""

    @property
    def batches(self) -> Iterator[dict[str, Any]]:
        """One pass over the loader. Raises the UserError of an image that cannot be read."""
        if isinstance(self.loader, MemoryLoader) and self.side is None:
            return iter(self.loader)  # there is no image that cannot be read
        return self._readable(self.loader if self.side is None else self.side.copied(self.loader))

    @staticmethod
    def _readable(batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
        for batch in batches:
            if isinstance(batch, UserError):
                raise batch
            yield batch


def create_input(
    config: Config,
    accelerator: Accelerator,
    splits: Splits,
    size: int,
    memory_format: torch.memory_format,
    plan: Plan,
) -> dict[str, Any]:
    """The fields of TrainingSetup that depend on how many samples a process computes at once. Collective.

    `size` and `memory_format`: of the model's input in training.
    """

    def pipeline(config: Config, source: Source, sampler: IndexSampler, **options: Any) -> InputPipeline:
        options["memory_format"] = memory_format
        return create_input_pipeline(config, splits, source, sampler, accelerator, **options)

    sampler = create_sampler(config, splits, plan)
    training = pipeline(config, splits.train, sampler, training=True, size=size)
    evaluation_batch = max(EVALUATION_BATCH, plan.micro_batch)
    of_evaluation = {"training": False, "size": config.model.eval_image_size or size}

    def evaluation(source: Source) -> InputPipeline:
        batch = plan.processes * evaluation_batch_size(config, len(source), evaluation_batch)
        return pipeline(config, source, EvaluationSampler(len(source), batch), **of_evaluation)

    return {
        "plan": plan,
        "sampler": sampler,
        "evaluation_batch": evaluation_batch,
        "training": training,
        "evaluations": {
            split: evaluation(source)
            for split, source in {"val": splits.validation, "test": splits.test}.items()
            if source is not None
        },
    }


EVALUATION_BATCH = 256
"""Samples of a process in one batch of evaluation, if no more are trained at once: it needs no gradients."""


def evaluation_batch_size(config: Config, samples: int, largest: int = EVALUATION_BATCH) -> int:
    """Samples of a process in one batch of evaluating a split of `samples`, `largest` at most unless it is given.

    A small split is not padded to `largest`, but to a power of two. The number of processes does not count: another
    shape could change bits.
    """
    return config.eval_batch_size or min(largest, 1 << (samples - 1).bit_length())


def create_sampler(config: Config, splits: Splits, plan: Plan) -> TrainingSampler:
    """The order of the training samples. Raises UserError if the data does not have what it needs."""
    if config.data.order == "shards":
        from accel_train.data.sources.sharded import create_shard_sampler

        return create_shard_sampler(config, splits, plan)
    draws = None
    if config.data.sampler != "shuffle":
        from accel_train.data.order.drawing import create_draws

        draws = create_draws(config, splits.train.labels, splits.train_weights, splits.unreadable)
    repeated = {"repeats": config.data.repeats, "samples": len(splits.train)}
    return TrainingSampler(plan, config.seed, splits.unreadable, draws, **repeated)


def create_input_pipeline(
    config: Config,
    splits: Splits,
    source: Source,
    sampler: IndexSampler,
    accelerator: Accelerator,
    *,
    training: bool,
    size: int,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> InputPipeline:
    """The input pipeline of `source`: its loader, and the transform of its batches (with augmentation if `training`).

    `size` and `memory_format` are of the model's input.
    Collective: the processes agree on where to keep the images. Raises UserError if the settings of `config.augment` do
    not fit the images or the input, or if the images cannot be kept where `config.data.placement` says.
    """
    augment = config.augment if training else config.augment.in_evaluation(size)
    _check_images(augment, splits, source, size, training=training)
    mean, std = resolve_mean_std(config, splits)
    device = accelerator.device
    per_image = transforms_each_image(has_one_size(source), augment, training=training)
    place, size_bytes = choose_place(config.data, source, accelerator, per_image=per_image)
    transform = BatchTransform(
        augment,
        size=size,
        mean=mean,
        std=std,
        full_scale=splits.full_scale,
        num_classes=len(splits.classes),
        training=training,
        per_image=per_image,
        device=device,
        memory_format=memory_format,
        virtual_batch=sampler.virtual_batch,
    )
    loader: Loader
    if place == "disk" or per_image:
        from accel_train.data.torch_loader import create_loader

        torch_loader = create_loader(
            source,
            sampler,
            augment,
            training=training,
            size=size,
            seed=config.seed,
            workers=config.data.workers,
            device=device,
            cores=_cores(accelerator) if config.data.workers is None else 1,
            reduced_decode=config.data.reduced_decode,
            draw_parameters=transform.draw_parameters,
            mean=mean,
        )
        workers, prefetch = torch_loader.num_workers, torch_loader.prefetch_factor or 0
        loader = accelerator.prepare_data_loader(torch_loader)
    else:
        workers = prefetch = 0
        loader = MemoryLoader(
            source,
            sampler,
            accelerator,
            seed=config.seed,
            pixels_device=device if place == "device" else torch.device("cpu"),
            memory_format=memory_format,
            draw_parameters=transform.draw_parameters,
        )
    placement = Placement(place, size_bytes, workers, prefetch)
    return InputPipeline(loader, transform, len(source), placement, _side(device, place), splits.multi_label)


def _side(device: torch.device, place: Place) -> SideStream | None:
    if device.type != "cuda" or place == "device":
        return None
    from accel_train.data.side_stream import SideStream

    return SideStream(device)


def _check_images(augment: Augment, splits: Splits, source: Source, size: int, *, training: bool) -> None:
    """Raise UserError if the images of `source`, one of `splits`, do not fit what `augment` asks for."""
    if training:
        check_channels(augment, splits.channels, splits.full_scale)
        if augment.own != "none":
            from accel_train.data.transforms.own import check_own

            check_own(augment.own, splits.channels, size)
    check_resize(augment, size)
    if training and augment.crop == "random" and augment.pad_mode == "reflect":
        short_side = augment.resize or (size if has_one_size(source) else resize_default(size))
        if augment.pad >= short_side:
            raise UserError(f"--augment.pad: found {augment.pad}, but images have {short_side} pixels; use fewer.")


def _cores(accelerator: Accelerator) -> int:
    """The number of the host's cores for this process. Collective at the first call for an accelerator.

    The processes exchange the sets of cores that they may use, because Slurm and MPI may or may not have bound each
    process to its own cores.
    """
    if accelerator not in _cores_of:
        own_cores = core_set()
        everyone = [(hostname(), own_cores)]
        if accelerator.num_processes > 1:
            everyone = gather_object(everyone)
        _cores_of[accelerator] = share_of_cores(own_cores, [cores for host, cores in everyone if host == hostname()])
    return _cores_of[accelerator]
