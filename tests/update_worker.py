"""Computes the first updates of recipes: `… tests/update_worker.py OUT float32|float64 ACCUMULATIONS -- OPTIONS -- …`.

Each group of OPTIONS is a command line of `accel-train train`. The main process writes OUT, by torch.save:
(number of the group, accumulation) -> for each update the loss, the gradient and the running statistics, float64.
"""

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import torch

from accel_train import models, training_setup
from accel_train.checkpoint.state import TrainState
from accel_train.config.options import parse
from accel_train.data.order import share
from accel_train.data.sources.load import load_splits
from accel_train.launch.environment import prepare_environment
from accel_train.records.events import Stream
from accel_train.records.meter import Meter
from accel_train.step import Guard
from accel_train.task import ONE_LABEL
from accel_train.train import update
from accel_train.training_setup import connect, create_training_setup


def updates(options: list[str], accumulation: int, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """What every update of the run's epochs computes, as train.py computes it."""
    launch = prepare_environment()
    config = parse(options)
    slots = share(config.batch_size, launch.world_size, config.virtual_batch_size or 1)
    config = dataclasses.replace(config, micro_batch_size=slots // accumulation)
    accelerator = connect(config, launch)
    splits = load_splits(config.data, config.seed)
    setup = create_training_setup(config, launch, accelerator, splits)
    assert setup.plan.accumulation == accumulation
    assert next(setup.bare_model.parameters()).dtype == dtype
    transform = setup.training.transform
    setup = dataclasses.replace(
        setup, training=dataclasses.replace(setup.training, transform=cast_inputs(transform, setup.bare_model))
    )
    losses: list[torch.Tensor] = []
    guard = Guard(config, accelerator, setup.model, Stream([]).emit)
    run: Any = SimpleNamespace(state=TrainState(), guard=guard, meter=Meter(accelerator, ONE_LABEL), schedule_offset=0)
    run.meter.add = lambda logits, targets, weighted, weights: losses.append(weighted.double().sum())
    results: list[dict[str, torch.Tensor]] = []
    step = setup.optimizer.step
    parameters = [parameter for parameter in setup.bare_model.parameters() if parameter.requires_grad]

    def record_and_step() -> None:
        gradients = [parameter.grad.flatten() for parameter in parameters if parameter.grad is not None]
        # At most 10 000 elements of each: all of them would be gigabytes.
        results.append({"gradient": torch.cat([each[:: len(each) // 10_000 + 1].double() for each in gradients])})
        step()

    setup.optimizer.step = record_and_step
    for epoch in range(int(config.epochs)):
        models.set_train_mode(setup.model, config.model)
        setup.sampler.seek(epoch)
        run.state.epoch_samples = 0
        for size, micro_batches in setup.sampler.updates(setup.training.batches):
            samples = size.samples
            assert update(setup, run, micro_batches, samples)
            run.state.update += 1
            run.state.epoch_samples += size.covered
            loss = accelerator.reduce(torch.stack(losses).sum(), reduction="sum") / samples
            losses.clear()
            buffers = [b.double().flatten() for n, b in setup.bare_model.named_buffers() if "running" in n]
            results[-1] |= {"loss": loss, "statistics": torch.cat(buffers) if buffers else torch.zeros(1)}
    return results


def cast_inputs(transform: Any, model: torch.nn.Module) -> Any:
    dtype = next(model.parameters()).dtype

    def cast(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = transform(batch)
        return inputs.to(dtype), targets.to(dtype) if targets.is_floating_point() else targets

    return cast


def main() -> None:
    out, precision, accumulations, *rest = sys.argv[1:]
    create_new_model = training_setup.create_new_model

    def create_in_precision(*arguments: Any, **options: Any) -> Any:
        model, *rest = create_new_model(*arguments, **options)
        return (model.to(getattr(torch, precision)), *rest)

    training_setup.create_new_model = create_in_precision
    if precision == "float64":
        training_setup.rebuild_ddp_buckets = lambda *_: None  # it would pass float32 images
    groups: list[list[str]] = []
    for word in rest:
        if word == "--":
            groups.append([])
        else:
            groups[-1].append(word)
    results = {}
    for number, options in enumerate(groups):
        for accumulation in map(int, accumulations.split(",")):
            results[number, accumulation] = updates(options, accumulation, getattr(torch, precision))
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    torch.save(results, out)


if __name__ == "__main__":
    main()
