"""DDP's buckets of gradients, settled before the first update: a restart must not show in the last bits.

DDP sums gradients bucket by bucket. It fills the buckets in the order of the parameters, and anew before its second
synchronised backward pass, in the order in which the first one had the gradients ready. From three processes on, a
float's place in a bucket decides in which order the processes' values are added to it. So the first updates after
each start would be rounded otherwise than those that follow.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor, nn


def settle_buckets(accelerator: Accelerator, model: nn.Module, inputs: Tensor) -> None:
    """Pass once forward and backward through the prepared `model`, and leave weights and buffers as they were.

    Collective. `inputs`: float32 [b, C, size, size], of a training batch's shape; their values do not matter.
    """
    if accelerator.num_processes < 3:
        return
    before = [buffer.clone() for buffer in model.buffers()]
    model(inputs).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
