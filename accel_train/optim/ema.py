"""The exponential moving average (EMA) of the weights, kept by timm. Imported only by a run that has one."""

from __future__ import annotations

from collections.abc import Iterator

from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_train.config.schema import Ema as EmaOptions


def create_ema(
    ema: EmaOptions, model: nn.Module, updates_per_epoch: int = 1, batch_size: int = 1, epochs: float = 1
) -> ModelEmaV3:
    """The EMA of the weights and buffers of `model` (unwrapped, on its device).

    After each update call `update_ema`. Its `.module` is the averaged model.
    """
    # torchvision's references/classification/train.py; its batch_size * world_size is batch_size here.
    scale = batch_size * ema.every_updates / epochs if ema.scale_decay else 1.0
    decay = 1 - min(1.0, (1 - ema.decay) * scale) if ema.scale_decay else ema.decay
    copied = round(ema.after_epochs * updates_per_epoch)
    result = ModelEmaV3(model, decay=decay, update_after_step=copied)
    result.every, result.updates_per_epoch = ema.every_updates, updates_per_epoch
    return result


def update_ema(ema: ModelEmaV3, model: nn.Module, updates: int) -> None:
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
