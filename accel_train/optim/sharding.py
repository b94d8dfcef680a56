"""What FSDP2 must not do to BatchNorm."""

from __future__ import annotations

from accelerate import Accelerator
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
