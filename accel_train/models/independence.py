"""Finds out, before a run, whether what a model computes for a sample depends on how the batch is divided.

Such a model learns something else on another number of processes. Nobody can list all layers of all libraries, so the
model is tried with a few samples: does it draw from a global random generator, and does the whole batch give what its
halves give? With --bitwise each forward pass of training is one virtual batch, whose random numbers are seeded
(optim/bitwise.py): there it may do both, but not in evaluation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.config.schema import Config
from accel_train.errors import UserError, first_of
from accel_train.launch.agreement import broadcast_from_main
from accel_train.models.batchnorm import VirtualBatches
from accel_train.models.dropout import DropoutKeys, KeyedFunctions, convert_dropout
from accel_train.models.training_pass import TrainingPass, of_all_sizes, try_training
from accel_train.models.trial import SAMPLES, class_name, different_images, float_tensors, trace_pass, unchanged
from accel_train.models.wrapping import release_unrepeatable

TOLERANCE = 1e-4
"""Relative. Kernels round differently for other batch sizes, which changes at most some 1e-6 in 30 models."""


@dataclass(frozen=True)
class Independence:
    """What `check_independence` found."""

    needs_functions: bool
    """Whether the model must run inside `KeyedFunctions` in training."""
    warnings: tuple[str, ...]
    """What still depends on the number of processes, for the user."""


def make_independent(
    config: Config, accelerator: Accelerator, model: nn.Module, channels: int, size: int, virtual_batch: int
) -> tuple[VirtualBatches, DropoutKeys, Independence]:
    """Convert the layers of `model` that mix samples or draw random numbers, in place, so that what it computes for a
    sample does not depend on the number of processes; and check that nothing else does, with images of `size` pixels
    and of model.progressive_sizes. Raises UserError if --bitwise is not possible, or if the device does not have the
    model's layers."""
    _check_synchronized(config, accelerator, model)
    in_update = config.batch_size // virtual_batch if config.bitwise else None
    virtual_batches = VirtualBatches(model, virtual_batch, in_update)
    dropout, modules = convert_dropout(model, config.seed), virtual_batches.modules
    parameter = next(model.parameters())
    tried, passed = list[Independence](), list[TrainingPass]()
    by_ddp = accelerator.num_processes > 1 and not accelerator.is_fsdp2 and not config.bitwise  # gradients are summed
    for pixels in (size, *config.model.progressive_sizes):
        images = different_images(channels, pixels).to(parameter.device, parameter.dtype)
        recomputes, bitwise = config.model.gradient_checkpointing, config.bitwise
        tried.append(check_independence(model, images, dropout, modules, recomputes=recomputes, bitwise=bitwise))
        passed.append(try_training(model, images, modules, gradients=by_ddp))
    warnings = tuple(dict.fromkeys(text for each in tried for text in each.warnings))
    found = Independence(any(each.needs_functions for each in tried), warnings)
    # All processes must do the same, even if the trial rounded otherwise on another kind of device.
    independence, passes = broadcast_from_main(accelerator, lambda: (found, of_all_sizes(passed)))
    independence = replace(independence, warnings=(*independence.warnings, *passes.warnings(bitwise=config.bitwise)))
    if config.bitwise and independence.warnings:
        raise UserError(f"--bitwise: {independence.warnings[0]}")
    virtual_batches.set_calls(irregular=passes.irregular, of_no_sample=passes.of_no_sample)
    passes.prepare_ddp(accelerator)
    return virtual_batches, dropout, independence


def _check_synchronized(config: Config, accelerator: Accelerator, model: nn.Module) -> None:
    """Raise UserError if `model` has a SyncBatchNorm that cannot be trained here. On one process it is a BatchNorm."""
    places = [
        f"{name} (SyncBatchNorm)" for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)
    ]
    instead = "Use a BatchNorm instead: it normalises virtual batches, the same on any number of processes."
    if places and config.bitwise:
        raise UserError(f"--bitwise: model: {first_of(places)} normalises by the samples of all processes. {instead}")
    if places and accelerator.num_processes > 1 and accelerator.device.type in ("cpu", "mps"):
        raise UserError(
            f"model: {first_of(places)}: torch has it only on GPUs, if there are several processes. {instead}"
        )


def check_independence(
    model: nn.Module,
    images: Tensor,
    keys: DropoutKeys,
    batch_norms: Sequence[nn.Module] = (),
    *,
    recomputes: bool = False,
    bitwise: bool = False,
) -> Independence:
    """Try `model` in the mode (training) that it is in, with `images`, SAMPLES of them on its device.

    `keys`: what `convert_dropout(model)` returned. `batch_norms`: modules that something else takes care of; they are
    tried in evaluation mode. `recomputes`: the model uses gradient checkpointing. `bitwise`: a forward pass of training
    always has the samples of one virtual batch, and its random numbers are seeded; then the warnings are what --bitwise
    cannot do nevertheless. Call it before the model is wrapped. Layers whose masks cannot be repeated in gradient
    checkpointing are released from `keys`. Besides, nothing is changed: buffers, gradients, random generators. It
    raises nothing: a model that cannot be tried is a warning.
    """
    functions = False
    try:
        with unchanged(model, images.device), _checked(model, keys, batch_norms):
            released = release_unrepeatable(model, images, keys) if recomputes else []
            draws, coupled = _dependencies(model, images, keys, nullcontext())
            # A function that gradient checkpointing calls again would not be redirected then.
            if draws and not recomputes:
                others, coupled = _dependencies(model, images, keys, KeyedFunctions(keys))
                functions, draws = others != draws, others
            obstacles = _obstacles(model, images, keys, functions) if bitwise else []
    except Exception as error:  # whatever a model does: training will show whether it is a mistake
        line = (str(error).splitlines() or [type(error).__name__])[0]
        return Independence(
            False, (f"model: could not check whether a sample depends on the others of its micro-batch ({line})",)
        )
    found = _without_statistics(model, batch_norms)
    if bitwise:
        return Independence(functions, (*found, *obstacles))
    if released:
        found.append(
            f"model.gradient_checkpointing: {first_of(released)}: called in several checkpointed parts of the model, "
            "so its dropout masks depend on the number of processes. Set it to false to avoid that."
        )
    operators = [f"{operator} in {place}" for place, operator in draws.items() if place not in released]
    if operators:
        found.append(
            "model: draws random numbers that depend on the number of processes: "
            f"{first_of(operators)}. Their distribution is correct, but with another number of processes the numbers "
            "are different. To avoid that, set the rate to 0 or choose another model."
        )
    if coupled:
        found.append(
            f"model: the output of {coupled} for a sample depends on the other samples of its micro-batch. So the "
            "result depends on the number of processes. To avoid that, choose another model or normalisation."
        )
    return Independence(functions, tuple(found))


def _without_statistics(model: nn.Module, batch_norms: Sequence[Any]) -> list[str]:
    """A warning of those of the BatchNorms that have no running statistics for evaluation."""
    untracked = [module for module in batch_norms if not module.track_running_stats]
    places = [f"{name} ({class_name(module)})" for name, module in model.named_modules() if module in untracked]
    if not places:
        return []
    return [
        f"model: {first_of(places)}: without running statistics (track_running_stats=False) an evaluation normalises "
        "by the samples of its batch. So its results depend on the number of processes. Set "
        "track_running_stats to true."
    ]


def _obstacles(model: nn.Module, images: Tensor, keys: DropoutKeys, functions: bool) -> list[str]:
    """What depends on the number of processes, though each forward pass of training is one virtual batch.

    `functions`: the model runs inside `KeyedFunctions` in training. Afterwards the model is in evaluation mode.
    """
    found, passes = [], []
    for _ in range(2):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        keys.set_samples(torch.arange(len(images), device=images.device), 0)
        with KeyedFunctions(keys) if functions else nullcontext(), torch.no_grad():
            passes.append(float_tensors(model(images)))
    if not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(*passes, strict=True)):
        found.append(
            "model: two forward passes with the same images and random numbers do not give the same. So it has a "
            "random generator of its own, or another state, which depends on the number of processes. Draw from the "
            "global generators of torch, NumPy or Python, or choose another model."
        )
    model.eval()
    keys.clear()
    draws, coupled = _dependencies(model, images, keys, nullcontext())
    why = "So the results of an evaluation depend on the number of processes. Choose another model or normalisation."
    if draws:
        operators = [f"{operator} in {place}" for place, operator in draws.items()]
        found.append(f"model: draws random numbers in evaluation, too: {first_of(operators)}. {why}")
    if coupled:
        found.append(
            f"model: in evaluation the output of {coupled} for a sample depends on the others of its batch. {why}"
        )
    return found


@contextmanager
def _checked(model: nn.Module, keys: DropoutKeys, batch_norms: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, masks drop half of their elements, because one that drops little hides errors. All BatchNorms normalise
    by running statistics, even one that has none."""
    untracked: list[Any] = [module for module in batch_norms if not module.track_running_stats]
    for module in batch_norms:
        module.eval()
    for module in untracked:
        parameter = next(chain(module.parameters(), model.parameters()))
        module.running_mean = parameter.new_zeros(module.num_features)
        module.running_var = parameter.new_ones(module.num_features)
    keys.rate_of_check = 0.5
    try:
        yield
    finally:
        for module in untracked:
            module.running_mean = module.running_var = None
        keys.rate_of_check = None
        keys.clear()


def _dependencies(
    model: nn.Module, images: Tensor, keys: DropoutKeys, context: AbstractContextManager[Any]
) -> tuple[dict[str, str], str | None]:
    """The draws from global generators, and the first module whose output for a batch is not that for its halves."""
    ids = torch.arange(SAMPLES, device=images.device)
    traces = []
    for part in (slice(None), slice(SAMPLES // 2), slice(SAMPLES // 2, None)):
        if model.training:
            keys.set_samples(ids[part], 0)
        with context, torch.no_grad():
            traces.append(trace_pass(model, images[part]))
    whole, *halves = traces
    compared = min((trace.comparable for trace in traces if trace.comparable is not None), default=len(whole.totals))
    coupled = None
    for total, *parts in list(zip(whole.totals, *(half.totals for half in halves), strict=False))[:compared]:
        if not _adds_up(total, parts):
            coupled = total[0]
            break
    if coupled is None and not whole.draws:
        joined = (torch.cat(outputs) for outputs in zip(*(half.outputs for half in halves), strict=True))
        same = [
            _close(one, other) for one, other in zip(whole.outputs, joined, strict=True) if one.shape == other.shape
        ]
        coupled = None if all(same) else "the model"
    return whole.draws, coupled


def _adds_up(total: tuple[str, int, Tensor], parts: Sequence[tuple[str, int, Tensor]]) -> bool:
    """Whether the output of a batch has the sum of magnitudes of its halves' outputs."""
    place, count, value = total
    if any(part[0] != place for part in parts):
        return False  # another module was called
    if count == sum(part[1] for part in parts):
        return _close(value, sum((part[2] for part in parts), torch.zeros_like(value)))
    return count != parts[0][1] or _close(value, parts[0][2])  # the same for any batch, such as a table of positions


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree up to rounding, relative to the largest value. Values that are not finite agree."""
    difference = (one - other).abs().max() <= TOLERANCE * one.abs().max()
    return bool(difference | ~one.isfinite().all())
