"""What Accelerate, torch.compile and FSDP2 put around a model, and how to look through it."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _NormBase


def shard_batchnorm(accelerator: Accelerator, model: nn.Module) -> None:
    """Let FSDP2 keep each BatchNorm of `model` in float32, whatever the precision; elsewhere nothing is done.

    FSDP2 casts the parameters of a module to bf16, not its buffers, and no kernel takes a bf16 weight beside statistics
    in float32. So each BatchNorm becomes a part of its own, whose parameters stay float32: as under autocast with DDP,
    its input and output are bf16. To be called before the optimizer is made, for the parameters are others afterwards.
    """
    if not accelerator.is_fsdp2 or accelerator.mixed_precision == "no":
        return
    for module in [each for each in model.modules() if isinstance(each, _NormBase) and each.track_running_stats]:
        fully_shard(module, mp_policy=MixedPrecisionPolicy())


WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # what torch.compile and checkpointing add to names


def plain_name(name: str) -> str:
    """A parameter's name without the parts that wrappers inside the model add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model without DDP and torch.compile around it.

    Accelerator.unwrap_model would take DDP out of the compiled model itself, which then had no `no_sync`: an all-reduce
    for each micro-batch.
    """
    plain: nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return plain
