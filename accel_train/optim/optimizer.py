"""Optimizers, made by timm and torch."""

from __future__ import annotations

from typing import Any, cast

import torch
from timm.optim import Muon, create_optimizer_v2, get_optimizer_class, get_optimizer_info, list_optimizers
from torch import nn

from accel_train.config.schema import Optim
from accel_train.errors import UserError, nearest
from accel_train.models import classifier_names, input_names

# torch's optimizers that have a fused kernel, which updates all parameters at once, and the devices that have it. On
# other devices torch chooses its foreach implementation by itself.
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def create_optimizer(optim: Optim, model: nn.Module, *, sharded: bool = False) -> torch.optim.Optimizer:
    """The optimizer of those parameters of `model` that require gradients; `sharded`: FSDP2 will split them.

    The parameter groups are timm's: no weight decay on biases, norms and what the model itself excludes (with
    optim.decay_all only the latter), and with optim.layer_decay a group for each layer, with its factor
    `lr_scale` that only the schedules of `create_schedule` apply.

    Muon is for the hidden layers' weights (K. Jordan 2024, kellerjordan.github.io/posts/muon): first and last layer
    and embeddings go to timm's fallback, AdamW, as biases and norms do.

    Embeddings with sparse gradients get dense ones: most optimizers do not accept sparse ones, and where one does, its
    step is the same.
    """
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False
    if optim.name not in list_optimizers():
        hint = nearest(optim.name, list_optimizers(), count=5)
        raise UserError(f"optim.name: timm has no optimizer {optim.name!r}.{hint}")
    info = get_optimizer_info(optim.name)
    if getattr(info, "second_order", False):
        raise UserError(f"optim.name: {optim.name} needs second derivatives, which this trainer does not compute.")
    if optim.layer_decay is not None and not hasattr(model, "group_matcher"):
        raise UserError(
            "optim.layer_decay: only timm's models name their layers; leave it out, or choose a model of timm's."
        )
    options: dict[str, Any] = {}
    if optim.betas is not None:
        if not info.has_betas or info.num_betas != len(optim.betas):
            raise UserError(f"optim.betas: {optim.name} does not take {len(optim.betas)}; leave it out.")
        options["betas"] = optim.betas
    if optim.eps is not None:
        if not info.has_eps:
            raise UserError(f"optim.eps: {optim.name} has no eps; leave it out.")
        options["eps"] = optim.eps
    try:
        devices = {parameter.device.type for parameter in model.parameters()}
        kind = get_optimizer_class(optim.name, bind_defaults=False)
        # Of the fused kernels only Adam's accepts sharded tensors.
        if kind in FUSED and devices <= set(FUSED_DEVICES) and not (sharded and kind is torch.optim.SGD):
            options["fused"] = True
        if kind is Muon:
            options["fallback_list"] = [f"{layer}.*" for layer in (*input_names(model), *classifier_names(model))]
            options["fallback_no_weight_decay"] = True  # timm's models list their embeddings there
        optimizer = create_optimizer_v2(
            model,
            opt=optim.name,
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            momentum=optim.momentum,
            filter_bias_and_bn=not optim.decay_all,
            layer_decay=optim.layer_decay,
            **options,
        )
        if options.get("fused") and kind is torch.optim.SGD:
            optimizer.register_step_pre_hook(_zero_momentum)
    except (AssertionError, ImportError) as error:  # bitsandbytes or Apex
        raise UserError(f"optim.name: {optim.name} is not available in this environment: {error}") from error
    except ValueError as error:  # a value that the optimizer itself does not accept
        raise UserError(f"optim: {optim.name} does not accept its settings: {error}") from error
    return cast(torch.optim.Optimizer, optimizer)


def _zero_momentum(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Set the momentum of fused SGD to zeros before a parameter's first step. The result of that step is the same.

    torch makes it of memory that nobody has written to, for the first step to fill. If the kernel leaves that step out
    (found_inf: an overflow under fp16, as happens at first) it would stay as it is. And it fails if only some
    parameters have theirs: if the others had no gradient in the steps before.
    """
    if len(optimizer.state) == sum(len(group["params"]) for group in optimizer.param_groups):
        return
    for group in optimizer.param_groups:
        if group["momentum"]:
            for parameter in group["params"]:
                if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)
