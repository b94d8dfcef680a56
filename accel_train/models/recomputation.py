"""Gradient checkpointing repeats parts of the forward pass during the backward pass; they must give the same values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from accel_train.config.schema import Model
from accel_train.models.dropout import DropoutKeys
from accel_train.models.trial import class_name, float_tensors


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


def release_unrepeatable(model: nn.Module, images: Tensor, keys: DropoutKeys) -> list[str]:
    """Run a backward pass, and release the layers that do not have the same masks when checkpointing calls them again.

    That can only be a layer that several checkpointed segments share. torch restores its own generators for a segment,
    so a released layer repeats its masks. Returns the places of such layers.
    """
    layers: dict[nn.Module, str] = {
        module: name for name, module in model.named_modules() if getattr(module, "keys", None) is keys
    }
    calls: list[tuple[nn.Module, list[Tensor]]] = []

    def record(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        calls.append(
            (module, [values.detach().abs().sum() for values in (*float_tensors(inputs), *float_tensors(output))])
        )

    keys.set_samples(torch.arange(len(images), device=images.device), 0)
    hooks = [layer.register_forward_hook(record) for layer in layers]
    try:
        with torch.enable_grad():
            outputs = float_tensors(model(images.clone().requires_grad_()))
            first = len(calls)
            torch.stack([output.float().square().sum() for output in outputs]).sum().backward()  # type: ignore[no-untyped-call]
    finally:
        for hook in hooks:
            hook.remove()
    released = []
    for layer, sums in calls[first:]:
        name, before = layers[layer], [others for module, others in calls[:first] if module is layer]
        row = keys.layers.index(name)
        if row not in keys.released and not any(all(map(torch.isclose, sums, others)) for others in before):
            keys.released.add(row)
            released.append(f"{name} ({class_name(layer)})")
    return released
