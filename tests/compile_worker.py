"""Run `accel-train train ARGUMENTS`. Each process prints how many all-reduces DDP made, in how many ways it laid the
gradients of updates out, how many graphs were compiled, and whether the warm-up left everything as it was."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from accel_train import cli, training_setup
from accel_train.models.trial import torch_states
from accel_train.models.wrapping import unwrap_model, without_compilation

layouts: list[tuple[int, ...]] = []  # of each bucket: the sizes of its gradients, in their order
of_warm_up: set[tuple[int, ...]] = set()


def recording(_, bucket):  # without annotations, for DDP compares them with types
    layouts.append(tuple(gradient.numel() for gradient in bucket.gradients()))
    return allreduce_hook(None, bucket)


def with_hook(*arguments: Any, **options: Any) -> Any:
    accelerator = create_accelerator(*arguments, **options)
    prepare = accelerator.prepare

    def prepared(*objects: Any) -> Any:
        model, optimizer = prepare(*objects)
        parallel = without_compilation(model)
        if isinstance(parallel, torch.nn.parallel.DistributedDataParallel):
            parallel.register_comm_hook(None, recording)
        print("compiled" if parallel is not model else "plain", unwrap_model(model).__class__.__name__)
        return model, optimizer

    accelerator.prepare = prepared
    return accelerator


def warm_up(accelerator: Any, model: torch.nn.Module, inputs: torch.Tensor) -> None:
    def everything() -> list[torch.Tensor]:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return [*torch_states(inputs.device), *(value.clone() for value in model.state_dict().values()), *gradients]

    before = everything()
    rebuild_ddp_buckets(accelerator, model, inputs)
    after = everything()
    unchanged = len(before) == len(after) and all(map(torch.equal, before, after))
    print(f"warm-up: unchanged: {unchanged}")
    of_warm_up.update(layouts)
    layouts.clear()


create_accelerator, training_setup.create_accelerator = training_setup.create_accelerator, with_hook
rebuild_ddp_buckets, training_setup.rebuild_ddp_buckets = training_setup.rebuild_ddp_buckets, warm_up
code = cli.main(["train", *sys.argv[1:]])
graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] if "torch._dynamo" in sys.modules else 0
print(f"all-reduces: {len(layouts)}, layouts: {len(set(layouts))}, graphs: {graphs}")
print(f"those of the warm-up: {len(of_warm_up)}, common: {len(of_warm_up & {*layouts})}", flush=True)
sys.exit(code)
