"""Gradient checkpointing repeats parts of the forward pass during the backward pass; they must give the same values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from accel_train.config.schema import Model


def prepare_recomputation(model: nn.Module, settings: Model) -> list[Tensor]:
    """The buffers for `preserve_buffers`: none unless `model` (as Accelerate prepared it) uses gradient checkpointing.

    Parts that Accelerate wrapped (fsdp_activation_checkpointing) are set to repeat the same dropout masks, which
    Accelerate turns off. This changes `checkpoint_fn.keywords` of torch's CheckpointWrapper (checked with torch 2.15
    and Accelerate 1.15).
    """
    wrappers = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    for wrapper in wrappers:
        cast(Any, wrapper).checkpoint_fn.keywords["preserve_rng_state"] = True
    return list(model.buffers()) if wrappers or settings.gradient_checkpointing else []


@contextmanager
def preserve_buffers(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Restore `buffers` after the backward pass to their values after the forward pass.

    Otherwise BatchNorm would count the micro-batch in its running statistics twice.
    """
    before = [buffer.clone() for buffer in buffers]
    yield
    with torch.no_grad():
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
