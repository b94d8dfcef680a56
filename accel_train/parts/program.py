"""A program with a loop of its own: its processes, how they share an update, its loaders, and how it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset

from accel_train.data.order.plan import Plan, accumulation_steps, virtual_batch_size
from accel_train.data.order.samplers import IndexSampler
from accel_train.data.workers import no_collate
from accel_train.errors import UserError, print_logged
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.agreement import end_world
from accel_train.launch.environment import INTERRUPTED, prepare_environment, print_error
from accel_train.optim.bitwise import compute_deterministically
from accel_train.optim.performance import set_defaults


def connect(**options: Any) -> Accelerator:
    """The Accelerator of the processes that the launcher has started. It computes deterministically, on one thread or
    on OMP_NUM_THREADS. `options`: see `create_accelerator`. Raises UserError if processes are missing, or are alone.
    """
    accelerator = create_accelerator(prepare_environment(bitwise=True), **options)
    set_defaults(accelerator.device)
    compute_deterministically(accelerator)
    return accelerator


def share_batch(
    accelerator: Accelerator,
    samples: int,
    batch_size: int,
    virtual_batch: int | None = None,
    *,
    drop_last: bool = False,
) -> Plan:
    """How an update of `batch_size` samples is shared by all processes, out of `samples` an epoch.

    One forward pass has one virtual batch of `virtual_batch` samples (default: see `virtual_batch_size`): the same
    shapes on any number of processes, so the same kernels and the same bits. Raises UserError if that is impossible.
    """
    unit = virtual_batch or virtual_batch_size(batch_size, batchnorm=False, pairs=False)
    processes = accelerator.num_processes
    steps = accumulation_steps(batch_size, processes, unit, unit=unit, why=f"in virtual batches of {unit}")
    return Plan(samples, batch_size, processes, steps, drop_last, unit)


def create_loader(
    accelerator: Accelerator, dataset: Dataset[Any], sampler: IndexSampler, **options: Any
) -> DataLoader[Any]:
    """A DataLoader that gives each process its slice of each global micro-batch of `sampler`, on its device.

    `dataset` has a method `__getitems__`, which gets an IndexBatch and returns the batch, such as a dict of tensors.
    `options`: of torch's DataLoader, such as num_workers. Raises UserError if `accelerator` would not divide batches.
    """
    if not accelerator.split_batches:
        raise UserError(
            "The processes would get whole batches in turn, not their slices of each batch. Create the Accelerator "
            "with parts.connect(), or with dataloader_config=DataLoaderConfiguration(split_batches=True)."
        )
    # An IndexBatch in place of a list of indices.
    loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=sampler, collate_fn=no_collate, **options)  # type: ignore[arg-type]
    prepared: DataLoader[Any] = accelerator.prepare_data_loader(loader)
    return prepared


def run_program(main: Callable[[], None]) -> int:
    """Call `main` and return the program's exit code; a UserError is one line on stderr, without a traceback."""
    print_logged()
    try:
        main()
    except UserError as error:
        print_error(error, Path(sys.argv[0]).name)
        return error.code
    except KeyboardInterrupt:  # the second Ctrl-C, or before there is something to save
        return INTERRUPTED
    end_world()
    return 0
