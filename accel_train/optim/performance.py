"""Settings that make an update fast on each kind of device, and what to say when its memory runs out.

They do not change what is learned.

optimizer.py chooses fused optimizers, the launch package the threads, and the launcher the precision. See PyTorch's
Performance Tuning Guide (https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.dataclasses import DynamoBackend
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor, nn

from accel_train.config.schema import Model
from accel_train.data.order import Plan
from accel_train.errors import UserError, counted
from accel_train.launch.accelerator import use_tf32
from accel_train.models.nets import use_padding_aware_convolutions
from accel_train.models.trial import restored
from accel_train.models.wrapping import without_compilation

CHANNELS_LAST_DEVICES = ("cpu", "cuda", "xpu")
LESS_MEMORY = "use --model.gradient-checkpointing true, a smaller model or a smaller --model.image-size"
# cuBLAS and cuDNN report in their own words that they could not allocate their workspaces.
_OF_LIBRARIES = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOC")


def set_defaults(device: torch.device) -> None:
    """Change settings of the whole process. Call it before the first forward pass."""
    if device.type == "cpu":
        _keep_freed_memory()
    if device.type == "cuda":
        # All batches have one shape (data/order.py), so cuDNN searches for the fastest convolutions only once.
        torch.backends.cudnn.benchmark = True
        use_tf32()


def prepare_compilation(accelerator: Accelerator, model: Model) -> None:
    """Prepare torch.compile for images of several sizes. Raise UserError if it would record CUDA graphs while gradients
    are accumulated.

    A graph's next call would overwrite what its previous call saved for the backward pass (pytorch issues 96693 and
    169545).
    """
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend != DynamoBackend.NO and model.eval_image_size:
        # Compile once for each size. By itself, torch would compile the second one for any size, which takes many times
        # as long and makes slower kernels.
        torch._dynamo.config.automatic_dynamic_shapes = False
    graphs = plugin.mode in ("reduce-overhead", "max-autotune") or plugin.backend == DynamoBackend.CUDAGRAPHS
    steps = accelerator.gradient_accumulation_steps
    if graphs and plugin.backend != DynamoBackend.NO and accelerator.device.type == "cuda" and steps > 1:
        raise UserError(
            f"torch.compile with CUDA graphs (--dynamo_mode {plugin.mode}) cannot be combined with gradient "
            f"accumulation (here {steps} micro-batches): choose --dynamo_mode default or max-autotune-no-cudagraphs, "
            "or a larger --micro-batch-size."
        )


def _keep_freed_memory() -> None:
    """Make glibc keep the memory that an update frees, for the next update.

    By default it returns large blocks to the system, which then maps and zeroes them again page by page: 5 to 20 % of
    the time of a small network's update. Settings in the user's environment are respected.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries do not have it
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # constants of malloc.h
        mallopt(mmap_threshold, 1 << 25)  # the largest allowed value
        mallopt(trim_threshold, 1 << 30)


def use_fastest_memory_format(accelerator: Accelerator, model: nn.Module) -> torch.memory_format:
    """Convert `model` (not yet prepared) to the fastest memory format; return the format its inputs should have.

    Channels last is fastest for convolutional networks; a transformer has one convolution, which makes its patches.
    FSDP shards only contiguous weights. On a CPU only the images are channels last: oneDNN reorders weights in any
    case, and the fused optimizers copy gradients that are not contiguous. Kernels of size 1x1 or with one channel have
    the same memory in both formats, but their gradients get channels-last strides, which DDP compares: so these weights
    get the same strides. On a CPU, kernel taps that see only padding are skipped, too.
    """
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    if (
        convolutions > 1
        and accelerator.device.type in CHANNELS_LAST_DEVICES
        and accelerator.distributed_type != DistributedType.FSDP
    ):
        if accelerator.device.type == "cpu":
            use_padding_aware_convolutions(model)
            for weight in model.parameters():
                if weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last):
                    weight.data = weight.data.to(memory_format=torch.channels_last)  # changes only the strides
        else:
            model.to(memory_format=torch.channels_last)
        return torch.channels_last
    return torch.contiguous_format


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer on which to call `step` and `zero_grad`, given one that Accelerate prepared.

    Accelerate's wrapper is only needed for fp16's loss scaler and on XLA. Elsewhere it would search all folders of
    Python's path twice per step for a package that is not installed.
    """
    needed = optimizer.scaler is not None or optimizer.accelerator_state.distributed_type == DistributedType.XLA
    return optimizer if needed else optimizer.optimizer


def rebuild_ddp_buckets(accelerator: Accelerator, model: nn.Module, inputs: Tensor) -> None:
    """Run one forward and backward pass of the prepared `model`, so that DDP rebuilds its buckets now.

    Afterwards weights, gradients, buffers and random generators are as before. Collective. `inputs`: float32
    [b, C, size, size], with the shape of a training batch; their values do not matter. A model that may leave out
    parameters keeps the buckets that it has. Nothing is compiled: training could not use a graph of this pass, whose
    samples no layer knows.
    """
    if accelerator.num_processes < 3 or accelerator.ddp_handler.find_unused_parameters:
        return
    model = without_compilation(model)
    with restored(model, accelerator.device):
        model(inputs).sum().backward()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device has too little memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        should_reduce_batch_size(error) or any(words in str(error) for words in _OF_LIBRARIES)
    )


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
