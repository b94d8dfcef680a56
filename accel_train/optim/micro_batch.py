"""The memory of a device: what to say when it runs out, and how much of it an update takes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import nn

from accel_train.data.order.plan import Plan
from accel_train.errors import UserError, counted
from accel_train.models.trial import restored

LESS_MEMORY = "use --model.gradient-checkpointing true, a smaller model or a smaller --model.image-size"
# cuBLAS and cuDNN report in their own words that they could not allocate their workspaces.
_OF_LIBRARIES = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOC")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device has too little memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        should_reduce_batch_size(error) or any(words in str(error) for words in _OF_LIBRARIES)
    )


@contextmanager
def as_in_training(model: nn.Module, optimizer: Any, device: torch.device) -> Iterator[None]:
    """Fill the memory as updates do: inside, the optimizer has its state, and each trained parameter a gradient.

    Afterwards weights, buffers, gradients, the optimizer and all random generators are as before, bit by bit. Raises
    the device's error if even this does not fit.
    """
    # Under fp16, Accelerate's wrapper would ask its loss scaler whether to make a step.
    optimizer = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [parameter.detach().to("cpu", copy=True) for parameter in trained]
    state = copy.deepcopy(optimizer.state_dict())
    benchmark = torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = False  # it would remember choices that it made with less free memory
        with restored(model, device):
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        with torch.no_grad():
            for parameter, value in zip(trained, weights, strict=True):
                parameter.copy_(value)
        optimizer.load_state_dict(state)
        clear_device_cache(garbage_collection=True)


@contextmanager
def memory_advice(advice: str) -> Iterator[None]:
    """Raise UserError with `advice` in place of the device's error for lack of memory: see `raise_memory_advice`."""
    try:
        yield
    except Exception as error:
        raise_memory_advice(error, advice)
        raise


def raise_memory_advice(error: Exception, advice: str) -> None:
    """Raise UserError with `advice` if `error` is the device's for lack of memory. One process alone may see it."""
    if is_out_of_memory(error):
        raise UserError(f"out of memory {advice}.", every_process=False) from error


def training_advice(plan: Plan) -> str:
    """Return what to do if the memory is too small for an update: the number to give, if there is a smaller one."""
    images = f"in training, with {counted(plan.micro_batch, 'image')} of a process at once"
    smaller = [size for size in plan.micro_batch_sizes if size < plan.micro_batch]
    half = [size for size in smaller if size <= plan.micro_batch // 2] or smaller
    if half:
        return f"{images}: give --micro-batch-size {half[-1]}, which continues the run with the same result"
    return f"{images}, which cannot be fewer: {LESS_MEMORY}"


def evaluation_advice(images: int) -> str:
    """Return what to do if the memory is too small to evaluate `images` images of a process at once."""
    what = f"in evaluation, with {counted(images, 'image')} of a process at once"
    return f"{what}: give --eval-batch-size {images // 2}" if images > 1 else f"{what}: {LESS_MEMORY}"
