"""Wrappers that Accelerate, torch.compile and FSDP2 put around a model, and how to remove them."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _NormBase


def shard_batchnorm(accelerator: Accelerator, model: nn.Module) -> None:
    """With FSDP2, keep each BatchNorm of `model` in float32 in any precision; without FSDP2, do nothing.

    FSDP2 casts a module's parameters to bf16, but not its buffers, and no kernel takes a bf16 weight with float32
    statistics. So each BatchNorm is sharded separately, with float32 parameters: as under autocast with DDP, its input
    and output are bf16. Call it before creating the optimizer, because it replaces the parameters. It uses torch's
    `_NormBase` (checked with torch 2.15).
    """
    if not accelerator.is_fsdp2 or accelerator.mixed_precision == "no":
        return
    for module in [item for item in model.modules() if isinstance(item, _NormBase) and item.track_running_stats]:
        fully_shard(module, mp_policy=MixedPrecisionPolicy())


WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Parts of parameter names that torch.compile and gradient checkpointing add (checked with torch 2.15)."""


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
