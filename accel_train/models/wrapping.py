"""Wrappers that Accelerate, torch.compile, FSDP2 and gradient checkpointing put around a model and its parts.

Gradient checkpointing repeats parts of the forward pass during the backward pass; they must give the same values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from accel_train.compat import WRAPPERS, NormBase, checkpoint_wrappers, repeat_random_numbers
from accel_train.config.schema import Model


def shard_batchnorm(accelerator: Accelerator, model: nn.Module) -> None:
    """With FSDP2, keep each BatchNorm of `model` in float32 in any precision; without FSDP2, do nothing.

    FSDP2 casts a module's parameters to bf16, but not its buffers, and no kernel takes a bf16 weight with float32
    statistics. So each BatchNorm is sharded separately, with float32 parameters: as under autocast with DDP, its input
    and output are bf16. Call it before creating the optimizer, because it replaces the parameters.
    """
    if not accelerator.is_fsdp2 or accelerator.mixed_precision == "no":
        return
    for module in [item for item in model.modules() if isinstance(item, NormBase) and item.track_running_stats]:
        fully_shard(module, mp_policy=MixedPrecisionPolicy())


def plain_name(name: str) -> str:
    """A parameter's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def without_compilation(model: nn.Module) -> nn.Module:
    """The prepared model without torch.compile around it; it may have DDP."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model without DDP and torch.compile around it.

    Accelerator.unwrap_model would remove DDP from the compiled model itself, which would then have no `no_sync` and do
    an all-reduce for each micro-batch.
    """
    plain: nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return plain


def logits_of(model: nn.Module, images: Tensor) -> Any:
    """What the model computes, or its `logits` if it returns an object with those, as the models of transformers do:
    then the model returns these alone from now on."""
    output = model(images)
    if isinstance(output, Tensor) or not isinstance(getattr(output, "logits", None), Tensor):
        return output
    model.register_forward_hook(_only_logits)
    return output.logits


def _only_logits(_model: nn.Module, _inputs: Any, output: Any) -> Any:
    return getattr(output, "logits", output)


def prepare_recomputation(model: nn.Module, settings: Model) -> bool:
    """Whether `model` (as Accelerate prepared it) uses gradient checkpointing: see `kept_buffers`.

    Parts that Accelerate wrapped (fsdp_activation_checkpointing) are set to repeat the same dropout masks, which
    Accelerate turns off.
    """
    wrappers = checkpoint_wrappers(model)
    for wrapper in wrappers:
        repeat_random_numbers(wrapper)
    return bool(wrappers) or settings.gradient_checkpointing


BufferCopy = tuple[nn.Module, str, Tensor, Tensor]
"""A buffer: its module, its name there and the tensor itself; and a copy of the tensor."""


def copy_buffers(model: nn.Module) -> list[BufferCopy]:
    """Copies of all buffers of `model`, for `restore_buffers`."""
    return [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


@torch.no_grad()
def restore_buffers(copies: Sequence[BufferCopy]) -> None:
    """Undo what passes have done to the buffers since `copy_buffers`."""
    for module, name, buffer, value in copies:
        buffer.copy_(value)
        now = module._buffers.get(name)
        # A pass may have put another tensor there. One of another shape is a table that it keeps.
        if now is not None and now is not buffer and (now.shape, now.dtype) == (value.shape, value.dtype):
            module._buffers[name] = buffer


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Inside, a pass may change the buffers of `model`: afterwards they are as before.

    Around a backward pass that repeats parts of the forward pass: BatchNorm would count the micro-batch twice.
    """
    copies = copy_buffers(model)
    try:
        yield
    finally:
        restore_buffers(copies)


def input_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that take the images, such as ("conv1",) or ("patch_embed.proj",).

    They are the entry of timm's configuration of the model; without one, the first layer.
    """
    if names := (getattr(model, "pretrained_cfg", None) or {}).get("first_conv"):
        return (names,) if isinstance(names, str) else tuple(names)
    return tuple(name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d)))[:1]


def broadcast_buffers(model: nn.Module) -> None:
    """Broadcast the main process's buffers, where processes may have others (models/trial.py). Collective."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def library_layer(module: str, name: str) -> type[nn.Module] | None:
    """A class of a library's module; None if nothing has imported that, so that no model can have such a layer.

    timm and torchvision take seconds to import.
    """
    layer: type[nn.Module] | None = getattr(sys.modules.get(module), name, None)
    return layer
