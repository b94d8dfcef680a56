"""The DataLoader of images that are fetched, decoded and transformed one by one, most often by data workers."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from accel_train.config.schema import Augment
from accel_train.data.order.samplers import IndexSampler
from accel_train.data.sources.splits import Source, has_one_size, unwrap_subset
from accel_train.data.sources.user.dataset import UserDataset
from accel_train.data.transforms.parameters import AugmentParameters, transforms_each_image
from accel_train.data.worker_processes import WORKERS, WorkerContext, WorkerInit
from accel_train.data.workers import BatchDataset, no_collate


def create_loader(
    source: Source,
    sampler: IndexSampler,
    augment: Augment,
    *,
    training: bool,
    size: int,
    seed: int,
    workers: int | None,
    device: torch.device,
    cores: int = 1,
    reduced_decode: bool = True,
    draw_parameters: AugmentParameters | None = None,
    mean: tuple[float, ...] = (0.0, 0.0, 0.0),
) -> DataLoader[dict[str, Tensor]]:
    """The loader of one split, to be prepared by Accelerate (which slices the order's batches for the processes).

    `training`: whether images are augmented; `size`: of the model's input, in pixels; `workers`: None chooses none for
    data in memory, else one for each of this process's `cores` (with a GPU: one less); `draw_parameters`: from the
    BatchTransform that takes the batches; `mean`: of each channel, 0 to 1.
    """
    per_image = transforms_each_image(has_one_size(source), augment, training=training)
    chooses = workers is None
    if workers is None:
        spare = device.type != "cpu"  # one core for the thread that launches the device's work
        workers = max(1, cores - spare) if per_image or not source.in_memory else 0
    if has_one_size(source):  # as BatchTransform does: evaluation and training see images at the same scale
        augment = dataclasses.replace(augment, resize=augment.resize or size)
    held, _ = unwrap_subset(source)
    if workers and isinstance(held, UserDataset) and not (chooses and held.stays_here()):
        held.check_picklable()
    elif isinstance(held, UserDataset):
        workers = 0
    transform = None
    if per_image:
        from accel_train.data.transforms.image import ImageTransform

        transform = ImageTransform(augment, size, training=training, decodes_smaller=reduced_decode, mean=mean)
    return DataLoader(
        BatchDataset(source, transform, seed, draw_parameters),
        batch_sampler=sampler,  # type: ignore[arg-type]  # an IndexBatch in place of a list of indices
        collate_fn=no_collate,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        # Evaluation's workers end with each pass, because they use the same cores as training's.
        persistent_workers=training and workers > 0,
        worker_init_fn=WorkerInit() if workers else None,
        multiprocessing_context=WorkerContext(WORKERS) if workers else None,
    )
