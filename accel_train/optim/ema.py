"""The exponential moving average (EMA) of the weights, with timm's values to the bit."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_train.config.schema import Ema as EmaOptions
from accel_train.errors import UserError


def create_ema(
    ema: EmaOptions, model: nn.Module, updates_per_epoch: int = 1, batch_size: int = 1, epochs: float = 1
) -> Ema:
    """The EMA of the weights and buffers of `model` (unwrapped, on its device).

    After each update call `update_ema`. Raises UserError if the weights have half precision.
    """
    if any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters()):
        raise UserError(
            "ema.enabled: the model's weights have half precision, in which an average hardly moves. Keep them in "
            "float32, and compute in half precision with accelerate launch --mixed_precision bf16."
        )
    # torchvision's references/classification/train.py; its batch_size * world_size is batch_size here.
    scale = batch_size * ema.every_updates / epochs if ema.scale_decay else 1.0
    decay = 1 - min(1.0, (1 - ema.decay) * scale) if ema.scale_decay else ema.decay
    return Ema(model, decay, ema.every_updates, updates_per_epoch, round(ema.after_epochs * updates_per_epoch))


class Ema:
    """The averaged model, `module`, and when it is updated: `every` so many updates, counted in each epoch."""

    def __init__(self, model: nn.Module, decay: float, every: int, updates_per_epoch: int, copied: int) -> None:
        """`copied`: so many updates, and the one after them, set the EMA to the weights."""
        self.module = copy.deepcopy(model).eval()
        self.decay, self.every, self.updates_per_epoch, self.copied = decay, every, updates_per_epoch, copied


@torch.no_grad()
def update_ema(ema: Ema, model: nn.Module, updates: int) -> None:
    """Update the EMA with the weights of `model` (unwrapped), if update number `updates`, from 1, is one at which it is
    updated. After the first update it equals the weights.

    Every process has the complete EMA. FSDP2 splits the model, so then this is collective.
    """
    if (updates - 1) % ema.updates_per_epoch % ema.every:
        return
    weight = 1.0 - (ema.decay if updates - 1 > ema.copied else 0.0)
    means: tuple[list[Tensor], list[Tensor]] = [], []
    counters: tuple[list[Tensor], list[Tensor]] = [], []
    for mean, value in zip(ema.module.state_dict().values(), model.state_dict().values(), strict=True):
        if isinstance(value, DTensor):  # one at a time, so that the complete tensors are never all in memory
            mean.lerp_(value.full_tensor(), weight)
            continue
        lists = means if mean.is_floating_point() else counters
        lists[0].append(mean)
        lists[1].append(value)
    if means[0]:
        torch._foreach_lerp_(*means, weight=weight)
    if counters[0]:  # BatchNorm's batches: all at once saves 20 kernels per update of ResNet-18 on a GPU
        torch._foreach_copy_(*counters)
