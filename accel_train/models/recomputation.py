"""Gradient checkpointing runs parts of the forward pass again, in the backward pass: the same must come out of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from accel_train.config.schema import Model


def prepare_recomputation(model: nn.Module, settings: Model) -> list[Tensor]:
    """The buffers that `preserve_buffers` has to keep: none unless `model` (as Accelerate prepared it) computes parts anew.

    Parts that Accelerate wrapped (fsdp_activation_checkpointing) are told to draw the same dropout masks again, which
    Accelerate tells them not to.
    """
    wrappers = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    for wrapper in wrappers:
        cast(Any, wrapper).checkpoint_fn.keywords["preserve_rng_state"] = True
    return list(model.buffers()) if wrappers or settings.gradient_checkpointing else []


@contextmanager
def preserve_buffers(buffers: Sequence[Tensor]) -> Iterator[None]:
    """For the backward pass: gives `buffers` the values back that the forward pass left in them.

    BatchNorm would count the micro-batch in its running statistics a second time.
    """
    before = [buffer.clone() for buffer in buffers]
    yield
    with torch.no_grad():
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
