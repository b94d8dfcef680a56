"""Gradient clipping: by norm, by value, or adaptive (AGC)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from timm.utils import dispatch_clip_grad
from timm.utils.agc import adaptive_clip_grad
from torch import nn
from torch.distributed.tensor import DTensor

from accel_train.config.schema import Optim
from accel_train.models import classifier_names


def parameters_to_clip(optim: Optim, model: nn.Module) -> list[nn.Parameter]:
    """The parameters whose gradients `clip_gradients` clips.

    All that are trained; for AGC without the classifier's (Brock et al. 2021, arxiv.org/abs/2102.06171,
    section 4.1).
    """
    heads = classifier_names(model) if optim.clip_mode == "agc" else ()
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not any(name.startswith(f"{head}.") for head in heads)
    ]


def clip_gradients(optim: Optim, parameters: Sequence[nn.Parameter]) -> None:
    """Clip the gradients in place as optim.clip and clip_mode say. Under fp16 they must be unscaled before.

    Collective if FSDP2 has split the parameters.
    """
    if optim.clip is None:
        return
    if optim.clip_mode == "agc" and any(isinstance(parameter, DTensor) for parameter in parameters):
        _clip_split_adaptively(parameters, optim.clip)
    else:
        dispatch_clip_grad(parameters, optim.clip, mode=optim.clip_mode)


def _clip_split_adaptively(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """timm's `adaptive_clip_grad` for the sharded tensors of FSDP2, which timm's own does not accept.

    FSDP2 splits between rows, and AGC compares the norms of whole rows: each process clips its own. Biases and norms
    are compared as a whole; the norms of all of them are summed up at once.
    """
    vectors: list[tuple[DTensor, DTensor]] = []
    for parameter in parameters:
        weight, gradient = parameter.detach(), parameter.grad
        if not (isinstance(weight, DTensor) and isinstance(gradient, DTensor)):
            adaptive_clip_grad(parameter, factor)
        elif weight.ndim < 2:
            vectors.append((weight, gradient))
        else:
            rows = weight.to_local()
            rows.grad = gradient.to_local()
            adaptive_clip_grad(rows, factor)
    if vectors:
        norms = cast(DTensor, torch.stack([each.norm() for pair in vectors for each in pair])).full_tensor()
        limits, found = norms[0::2].clamp(min=1e-3) * factor, norms[1::2]  # 1e-3: timm's, as is the next number
        scales = torch.where(found < limits, 1.0, limits / found.clamp(min=1e-6))
        for (_, gradient), scale in zip(vectors, scales, strict=True):
            gradient.to_local().mul_(scale)
