"""The exponential moving average (EMA) of the weights, kept by timm. Imported only by a run that has one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_train.config.schema import Ema as EmaOptions


def create_ema(
    ema: EmaOptions, model: nn.Module, updates_per_epoch: int = 1, batch_size: int = 1, epochs: float = 1
) -> Ema:
    """The EMA of the weights and buffers of `model` (unwrapped, on its device).

    After each update call `update_ema`. Its `.module` is the averaged model.
    """
    # torchvision's references/classification/train.py; its batch_size * world_size is batch_size here.
    scale = batch_size * ema.every_updates / epochs if ema.scale_decay else 1.0
    decay = 1 - min(1.0, (1 - ema.decay) * scale) if ema.scale_decay else ema.decay
    copied = round(ema.after_epochs * updates_per_epoch)
    result = Ema(model, decay=decay, update_after_step=copied)
    result.every, result.updates_per_epoch = ema.every_updates, updates_per_epoch
    return result


class Ema(ModelEmaV3):  # type: ignore[misc]
    """timm's EMA, but it copies all counters (BatchNorm's batches) at once, not one by one.

    That saves 20 kernels per update of ResNet-18 on a GPU. It overrides `apply_update_` of timm's ModelEmaV3 and uses
    its `_foreach_lerp_`, or torch's where timm calls that itself (checked with timm 1.0.27 and 1.0.31;
    tests/test_compat.py fails if they change).
    """

    every = updates_per_epoch = 1

    def apply_update_(self, model: Any, decay: float) -> None:
        if not self.foreach:
            super().apply_update_(model, decay)
            return
        means: tuple[list[Tensor], list[Tensor]] = [], []
        counters: tuple[list[Tensor], list[Tensor]] = [], []
        for pair in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            lists = means if pair[0].is_floating_point() else counters
            lists[0].append(pair[0])
            lists[1].append(pair[1])
        lerp = getattr(self, "_foreach_lerp_", None) or torch._foreach_lerp_
        lerp(*means, weight=1.0 - decay)
        if counters[0]:
            torch._foreach_copy_(*counters)


def update_ema(ema: Ema, model: nn.Module, updates: int) -> None:
    """Update the EMA with the weights of `model` (unwrapped), if update number `updates`, from 1, is one at which it is
    updated. After the first update it equals the weights.

    Every process has the complete EMA. FSDP2 splits the model, so then this is collective.
    """
    if (updates - 1) % ema.updates_per_epoch % ema.every:
        return
    if (generator := getattr(ema, "_sr_generator", None)) is not None:
        # timm rounds bfloat16 weights at random. Its generator's state is in no checkpoint: a run that goes on would
        # round otherwise.
        generator.manual_seed(updates)
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        ema.foreach = False  # one tensor at a time, so that the complete tensors are never all in memory
        ema.update(_Whole(model), step=updates)
    else:
        ema.update(model, step=updates)


class _Whole:
    """The part of a model's interface that the EMA uses; returns FSDP2's split tensors complete."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> _Whole:
        return self

    def values(self) -> Iterator[Tensor]:
        for tensor in self.model.state_dict().values():
            yield tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
