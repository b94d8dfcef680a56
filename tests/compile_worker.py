"""Run `accel-train train ARGUMENTS`; each process prints its number of DDP all-reduces."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from accel_train import cli, training_setup
from accel_train.models.wrapping import unwrap_model

counted = 0


def counting(group, bucket):  # without annotations, for DDP compares them with types
    global counted
    counted += 1
    return allreduce_hook(group, bucket)


def with_hook(*arguments: Any, **options: Any) -> Any:
    accelerator = create_accelerator(*arguments, **options)
    prepare = accelerator.prepare

    def prepared(*objects: Any) -> Any:
        model, optimizer = prepare(*objects)
        parallel = getattr(model, "_orig_mod", model)
        assert isinstance(parallel, torch.nn.parallel.DistributedDataParallel)
        parallel.register_comm_hook(None, counting)
        print("compiled" if parallel is not model else "plain", unwrap_model(model).__class__.__name__)
        return model, optimizer

    accelerator.prepare = prepared
    return accelerator


create_accelerator, training_setup.create_accelerator = training_setup.create_accelerator, with_hook
code = cli.main(["train", *sys.argv[1:]])
print(f"all-reduces: {counted}", flush=True)
sys.exit(code)
