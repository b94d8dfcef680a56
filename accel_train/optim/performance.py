"""What makes an update fast on each kind of device. None of it changes what is learned.

The fused optimizers are chosen in optim.py, the threads in launch.py; the precision is the launcher's. See PyTorch's
Performance Tuning Guide (https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html).
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.dataclasses import DynamoBackend
from torch import Tensor, nn

from accel_train.errors import UserError
from accel_train.models.padding import use_padding_aware_convolutions

CHANNELS_LAST_DEVICES = ("cpu", "cuda", "xpu")


def set_defaults(device: torch.device) -> None:
    """Settings of the whole process, before the first forward pass."""
    if device.type == "cpu":
        _keep_freed_memory()
    if device.type == "cuda":
        # All windows have one shape (see data/order.py), so that the fastest convolutions are looked for once.
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")  # TF32 where a float32 product is left; convolutions have it already


def check_compilation(accelerator: Accelerator) -> None:
    """Raise UserError if torch.compile would record CUDA graphs and gradients are accumulated: a graph's next call
    writes over what the last one left for its backward pass (pytorch issues 96693 and 169545)."""
    plugin = accelerator.state.dynamo_plugin
    graphs = plugin.mode in ("reduce-overhead", "max-autotune") or plugin.backend == DynamoBackend.CUDAGRAPHS
    steps = accelerator.gradient_accumulation_steps
    if graphs and plugin.backend != DynamoBackend.NO and accelerator.device.type == "cuda" and steps > 1:
        raise UserError(
            f"torch.compile with CUDA graphs (--dynamo_mode {plugin.mode}) does not go together with gradient "
            f"accumulation, of {steps} micro-batches here: choose --dynamo_mode default or max-autotune-no-cudagraphs, "
            "or a larger --micro-batch-size."
        )


def _keep_freed_memory() -> None:
    """Let glibc keep what an update frees for the next one.

    It gives large blocks back to the system at once, which maps and zeroes them anew, page by page: 5 to 20 % of an
    update of a small net. What the user's environment says of it stays.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # their numbers in malloc.h
        mallopt(mmap_threshold, 1 << 25)  # the most that it takes
        mallopt(trim_threshold, 1 << 30)


def use_fastest_memory_format(accelerator: Accelerator, model: nn.Module) -> torch.memory_format:
    """Lay out the weights of `model` (not yet prepared) as it is the fastest; returns the layout for its images.

    Channels last for nets of convolutions; a transformer has only the one that cuts its patches. FSDP shards
    contiguous weights only. On a CPU oneDNN brings weights into blocks of its own in any case, and the optimizers'
    fused kernels copy gradients that are not contiguous: there only images are channels last. Kernels of 1x1 or with
    one channel lie the same way in both; their gradients come with the strides of channels last, which DDP compares.
    What of a kernel sees nothing but padding is left out there, too (models/padding.py).
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
                    weight.data = weight.data.to(memory_format=torch.channels_last)  # the strides; nothing is moved
        else:
            model.to(memory_format=torch.channels_last)
        return torch.channels_last
    return torch.contiguous_format


def seed_generators(device: torch.device, word: int) -> None:
    """Seed the generators that dropout and stochastic depth draw from: the CPU's and that of `device`.

    `torch.manual_seed` seeds those of all kinds of devices, present or not: 0.1 to 0.4 ms, as long as the update of a
    small net on a GPU.
    """
    torch.default_generator.manual_seed(word)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(word)


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer to call `step` and `zero_grad` of, for one that Accelerate prepared.

    Accelerate's own does more only for fp16's loss scaler and on XLA; elsewhere it looks twice a step for a package
    that is not installed, in all folders of Python's path.
    """
    needed = optimizer.scaler is not None or optimizer.accelerator_state.distributed_type == DistributedType.XLA
    return optimizer if needed else optimizer.optimizer


def rebuild_ddp_buckets(accelerator: Accelerator, model: nn.Module, inputs: Tensor) -> None:
    """Pass once forward and backward through the prepared `model`, and leave weights and buffers as they were.

    Collective. `inputs`: float32 [b, C, size, size], of a training batch's shape; their values do not matter.
    """
    if accelerator.num_processes < 3:
        return
    before = [buffer.clone() for buffer in model.buffers()]
    model(inputs).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
