"""The exponential moving average (EMA) of the weights, kept by timm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_train.config.schema import Ema


def create_ema(ema: Ema, model: nn.Module) -> ModelEmaV3 | None:
    """The running mean of the weights and buffers of `model` (unwrapped, on its device), if it is wanted.

    After each update call `update_ema`. Its `.module` is the averaged model.
    """
    return _Ema(model, decay=ema.decay, use_warmup=ema.warmup) if ema.enabled else None


class _Ema(ModelEmaV3):  # type: ignore[misc]
    """timm's, with one copy of all counters (BatchNorm's batches) in place of one of each: twenty kernels an update of
    ResNet-18 on a GPU."""

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
        self._foreach_lerp_(*means, weight=1.0 - decay)
        if counters[0]:
            torch._foreach_copy_(*counters)


def update_ema(ema: ModelEmaV3, model: nn.Module, updates: int) -> None:
    """Move the running mean towards the weights of `model` (unwrapped); after the first update it is these themselves.

    The mean is whole on every process, also under FSDP2, which splits the model: then all processes must call this.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        ema.foreach = False  # one tensor after the other: never all of them whole at once
        ema.update(_Whole(model), step=updates)
    else:
        ema.update(model, step=updates)


class _Whole:
    """What the running mean asks of a model, with its split tensors made whole."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> _Whole:
        return self

    def values(self) -> Iterator[Tensor]:
        for tensor in self.model.state_dict().values():
            yield tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share_buffers(model: nn.Module) -> None:
    """Give all processes the main one's buffers: BatchNorm's statistics, which each counts on its own. Collective.

    DDP does so by itself before each forward pass, but nobody does under FSDP2, nor for an EMA.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
