"""Input pipelines: from a sampler's index batches to batches of tensors on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.utils.data import DataLoader

from accel_train.config.checks import check_channels, check_resize
from accel_train.config.schema import Augment, Config, Data
from accel_train.data.batch_transform import BatchTransform, resize_default, transforms_each_image
from accel_train.data.memory import PLACES, MemoryLoader, Place, choose_place
from accel_train.data.order import (
    EvaluationSampler,
    IndexSampler,
    Plan,
    ShardOrder,
    TrainingSampler,
    create_draws,
    shard_bounds,
)
from accel_train.data.sources.load import IN_MEMORY, resolve_mean_std
from accel_train.data.sources.splits import Source, Splits, has_one_size, unwrap_subset
from accel_train.errors import UserError, counted
from accel_train.launch.process import core_set, hostname, share_of_cores
from accel_train.task import Task
from accel_train.user_code import short_name

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


@dataclass
class InputPipeline:
    """Loads one split and transforms it into the model's input."""

    loader: Iterable[dict[str, Any]]
    """Yields this process's slices of the micro-batches, on its device: Accelerate's loader, or a MemoryLoader."""
    transform: BatchTransform
    samples: int  # of the split, over all processes
    placement: str  # of the pixels, and who loads them, as printed at the start of a run
    side: SideStream | None
    task: Task

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
    draws, repeats, samples = create_draws(config, splits.train.labels), config.data.repeats, len(splits.train)
    shards = None
    if config.data.order == "shards":
        bounds = shards_of(config.data, splits.train)
        shards = ShardOrder(bounds, seed=config.seed, open_shards=config.data.open_shards)
    return TrainingSampler(plan, config.seed, splits.unreadable, draws, repeats=repeats, samples=samples, shards=shards)


def shards_of(data: Data, source: Source) -> Tensor:
    """Which samples of `source` are in which shard: see `shard_bounds`. Raises UserError if the data has no shards.

    A source has some if it has `shard_numbers`: int64 [n], the number of the shard of each sample.
    """
    held, ids = unwrap_subset(source)
    numbers: torch.Tensor | None = getattr(held, "shard_numbers", None)
    if numbers is None:
        raise UserError(
            f"--data.order shards: the images of '{short_name('data.name', data.name)}' are not in shards; write them "
            "with `accel-train shards` and give --data.name wds (docs/large_data.md), or use --data.order full."
        )
    return shard_bounds(numbers if ids is None else numbers[ids])


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
    not fit the images or the input.
    """
    augment = config.augment if training else config.augment.in_evaluation(size)
    _check_images(augment, splits, source, size, training=training)
    mean, std = resolve_mean_std(config, splits)
    device = accelerator.device
    per_image = transforms_each_image(has_one_size(source), augment, training=training)
    place = choose_place(source, accelerator, per_image=per_image)
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
    loader: Iterable[dict[str, Any]]
    if place == "disk" or per_image:
        torch_loader = create_loader(
            source,
            sampler,
            transform,
            seed=config.seed,
            workers=config.data.workers,
            device=device,
            cores=_cores(accelerator) if config.data.workers is None else 1,
        )
        workers = torch_loader.num_workers
        loader = accelerator.prepare_data_loader(torch_loader)
    else:
        workers = 0
        loader = MemoryLoader(
            source,
            sampler,
            accelerator,
            seed=config.seed,
            pixels_device=device if place == "device" else torch.device("cpu"),
            memory_format=memory_format,
            draw_parameters=transform.draw_parameters,
        )
    placement = f"{PLACES[place]}, {counted(workers, 'worker')}, {counted(torch.get_num_threads(), 'thread')}"
    return InputPipeline(loader, transform, len(source), placement, _side(device, place), splits.task)


def _side(device: torch.device, place: Place) -> SideStream | None:
    if device.type != "cuda" or place == "device":
        return None
    return SideStream(device)


def _check_images(augment: Augment, splits: Splits, source: Source, size: int, *, training: bool) -> None:
    """Raise UserError if the images of `source`, one of `splits`, do not fit what `augment` asks for."""
    if training:
        check_channels(augment, splits.channels, splits.full_scale)
        if augment.own != "none":
            from accel_train.data.image_transform import check_own

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


# The DataLoader of images that are fetched, decoded and transformed one by one, most often by data workers.


def create_loader(
    source: Source,
    sampler: IndexSampler,
    transform: BatchTransform,
    *,
    seed: int,
    workers: int | None,
    device: torch.device,
    cores: int = 1,
) -> DataLoader[dict[str, Tensor]]:
    """The loader of one split, to be prepared by Accelerate (which slices the order's batches for the processes).

    `transform`: takes the batches; `workers`: None chooses none for data in memory, else one for each of this process's
    `cores` (with a GPU: one less).
    """
    from accel_train.data.sources.user import UserDataset
    from accel_train.data.worker_processes import WORKERS, WorkerContext, end_with_trainer
    from accel_train.data.workers import BatchDataset, no_collate

    augment, training = transform.augment, transform.training
    chooses = workers is None
    if workers is None:
        spare = device.type != "cpu"  # one core for the thread that launches the device's work
        workers = max(1, cores - spare) if transform.per_image or not source.in_memory else 0
    if has_one_size(source):  # as BatchTransform does: evaluation and training see images at the same scale
        augment = dataclasses.replace(augment, resize=augment.resize or transform.size)
    held, _ = unwrap_subset(source)
    if workers and isinstance(held, UserDataset) and not (chooses and held.stays_here()):
        held.check_picklable()
    elif isinstance(held, UserDataset):
        workers = 0
    of_images = None
    if transform.per_image:
        from accel_train.data.image_transform import ImageTransform

        of_images = ImageTransform(augment, transform.size, training=training, mean=transform.mean)
    return DataLoader(
        BatchDataset(source, of_images, seed, transform.draw_parameters),
        batch_sampler=sampler,  # type: ignore[arg-type]  # an IndexBatch in place of a list of indices
        collate_fn=no_collate,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        # Evaluation's workers end with each pass, because they use the same cores as training's.
        persistent_workers=training and workers > 0,
        worker_init_fn=end_with_trainer if workers else None,
        multiprocessing_context=WorkerContext(WORKERS) if workers else None,
    )


# Copies batches to a CUDA device while it computes.
#
# Accelerate's loader and MemoryLoader start to copy a batch (non-blocking, from pinned memory) when it is requested. By
# then the host is ahead of the device, which still has most of the last update to compute. On the stream of that work,
# the copy would wait for the work, and the next update for the copy. On a separate stream the copy begins at once.


class SideStream:
    """Runs a loader's copies on a separate CUDA stream. It does not fetch batches earlier than the loader would."""

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda
        self.device, self.stream = device, cuda.Stream(device)

    def copied(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the same batches (dicts with tensors, or errors). The current stream may use them; the host does not
        wait for the copy."""
        iterator, end = iter(batches), object()
        while True:
            with torch.cuda.stream(self.stream):
                batch = next(iterator, end)
            if batch is end:
                return
            here = torch.cuda.current_stream(self.device)
            here.wait_stream(self.stream)
            if isinstance(batch, dict):
                for value in batch.values():
                    if isinstance(value, Tensor) and value.device == self.device:
                        value.record_stream(here)  # the other stream owns the memory and must not reuse it early
            yield batch
            del batch  # so that its memory is free as soon as the caller drops it
