"""Optimizers, torch's and timm's, and their groups of parameters."""

from __future__ import annotations

import json
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any, cast

import torch
from torch import nn

from accel_train.config.schema import Optim
from accel_train.errors import UserError, nearest
from accel_train.models import input_names, required_classifier
from accel_train.user_code import parse_reference

# torch's optimizers that have a fused kernel, which updates all parameters at once, and the devices that have it. On
# other devices torch chooses its foreach implementation by itself.
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def create_optimizer(optim: Optim, model: nn.Module, *, sharded: bool = False) -> torch.optim.Optimizer:
    """The optimizer of those parameters of `model` that require gradients; `sharded`: FSDP2 will split them.

    The parameter groups are timm's: no weight decay on biases, norms and what the model itself excludes (all have it
    with optim.decay_all), and with optim.layer_decay a group for each layer, with its factor `lr_scale` that only
    `LearningRate` applies. What has a weight decay or a learning rate of its own gets groups of its own:
    norms (optim.norm_weight_decay) and the last layer (optim.head_lr).

    Muon is for the hidden layers' weights (K. Jordan 2024, kellerjordan.github.io/posts/muon): first and last layer
    and embeddings go to timm's fallback, AdamW, as biases and norms do.

    Embeddings with sparse gradients get dense ones: most optimizers do not accept sparse ones, and where one does, its
    step is the same.

    If optim.name is a user's own code, the groups alone are used: checkpoint/own_optimizer.py makes that optimizer.
    """
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False
    if parse_reference("optim.name", optim.name) is not None:
        optim = _groups_alone(optim)
    if optim.layer_decay is not None and not hasattr(model, "group_matcher"):
        raise UserError(
            "optim.layer_decay: only timm's models name their layers; leave it out, or choose a model of timm's."
        )
    try:
        kind, number_of_betas, has_eps = _kind(optim.name)
        options: dict[str, Any] = {}
        if optim.betas is not None:
            if number_of_betas != len(optim.betas):
                raise UserError(f"optim.betas: {optim.name} does not take {len(optim.betas)}; leave it out.")
            options["betas"] = optim.betas
        if optim.eps is not None:
            if not has_eps:
                raise UserError(f"optim.eps: {optim.name} has no eps; leave it out.")
            options["eps"] = optim.eps
        options |= _arguments(optim)
        devices = {parameter.device.type for parameter in model.parameters()}
        # Of the fused kernels only Adam's accepts sharded tensors.
        if kind in FUSED and devices <= set(FUSED_DEVICES) and not (sharded and kind is torch.optim.SGD):
            options["fused"] = True
        create = _create_timms if needs_timm(optim) else _create_torchs
        optimizer = create(optim, model, kind, options)
        if optim.decay_all:  # also what timm's models exclude, such as position embeddings
            for group in optimizer.param_groups:
                group["weight_decay"] = optim.weight_decay
        if optim.norm_weight_decay is not None:
            _separate(optimizer, norm_parameters(model), {"weight_decay": optim.norm_weight_decay})
        if optim.head_lr is not None:
            _scale_head(optimizer, model, optim.head_lr / optim.lr)
        if options.get("fused") and kind is torch.optim.SGD:
            optimizer.register_step_pre_hook(_zero_momentum)
    except (AssertionError, ImportError) as error:  # bitsandbytes or Apex
        raise UserError(f"optim.name: {optim.name} is not available in this environment: {error}") from error
    except ValueError as error:  # a value that the optimizer itself does not accept
        raise UserError(f"optim: {optim.name} does not accept its settings: {error}") from error
    except (TypeError, LookupError) as error:  # an argument that it does not have, or too few betas
        if optim.kwargs is None:
            raise
        raise UserError(f"--optim.kwargs: {optim.name} does not take {optim.kwargs}: {error}") from error
    return optimizer


TORCHS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"nesterov": True}),
    "momentum": (torch.optim.SGD, {"nesterov": False}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
}
"""torch's optimizers by timm's names, with what timm sets: made without timm, whose import takes a second."""


def needs_timm(optim: Optim) -> bool:
    """Whether timm makes the optimizer."""
    own = parse_reference("optim.name", optim.name) is not None
    return optim.layer_decay is not None or not (own or optim.name in TORCHS)


def _kind(name: str) -> tuple[type[torch.optim.Optimizer], int, bool]:
    """An optimizer's class, how many betas it takes, and whether it has an eps. Raises UserError for an unknown one."""
    if name in TORCHS:
        kind, _ = TORCHS[name]
        return (kind, 0, False) if kind is torch.optim.SGD else (kind, 2, True)
    from timm.optim import get_optimizer_class, get_optimizer_info, list_optimizers

    if name not in list_optimizers():
        hint = nearest(name, list_optimizers(), count=5) or " For your own, write FILE.py:FUNCTION."
        raise UserError(f"optim.name: timm has no optimizer {name!r}.{hint}")
    info = get_optimizer_info(name)
    if getattr(info, "second_order", False):
        raise UserError(f"optim.name: {name} needs second derivatives, which this trainer does not compute.")
    return get_optimizer_class(name, bind_defaults=False), info.num_betas if info.has_betas else 0, info.has_eps


def _create_torchs(optim: Optim, model: nn.Module, kind: type[Any], options: dict[str, Any]) -> torch.optim.Optimizer:
    """One of `TORCHS`, with the parameter groups of timm's `create_optimizer_v2`, in its order."""
    patterns: set[str] = getattr(model, "no_weight_decay", set)()
    kept: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_excluded = not optim.decay_all and (parameter.ndim <= 1 or name.endswith(".bias"))
            is_excluded |= not optim.weight_decay or any(fnmatch(name, pattern) for pattern in patterns)
            (kept if is_excluded else decayed).append(parameter)
    both = ({"params": kept, "weight_decay": 0.0}, {"params": decayed, "weight_decay": optim.weight_decay})
    settings = {"momentum": optim.momentum} if kind is torch.optim.SGD else {}
    settings |= {"lr": optim.lr, "weight_decay": 0.0, **TORCHS[optim.name][1], **options}
    return cast(torch.optim.Optimizer, kind([group for group in both if group["params"]], **settings))


def _create_timms(optim: Optim, model: nn.Module, kind: type[Any], options: dict[str, Any]) -> torch.optim.Optimizer:
    from timm.optim import Muon, create_optimizer_v2

    if kind is Muon:
        outer = (*input_names(model), *required_classifier(model, f"--optim.name {optim.name}"))
        options.setdefault("fallback_list", [f"{layer}.*" for layer in outer])
        options.setdefault("fallback_no_weight_decay", True)  # timm's models list their embeddings there
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
    return cast(torch.optim.Optimizer, optimizer)


def _groups_alone(optim: Optim) -> Optim:
    """Settings of an optimizer that has the parameter groups of a user's own one, and no state. Raises UserError for
    what only that one can have."""
    for name in ("momentum", "betas", "eps"):
        if getattr(optim, name) != getattr(Optim(), name):
            raise UserError(
                f"optim.{name}: your own optimizer says it itself: give it there, or by --optim.kwargs, and set "
                f"--optim.{name} {str(getattr(Optim(), name)).lower()}."
            )
    return replace(optim, name="momentum", momentum=0.0, kwargs=None)


def _arguments(optim: Optim) -> dict[str, Any]:
    """The arguments of optim.kwargs. Raises UserError for those that have an option of their own; betas and eps may be
    given here if theirs are not."""
    found: dict[str, Any] = json.loads(optim.kwargs or "{}")
    for name in found:
        if hasattr(optim, name) and (name not in ("betas", "eps") or getattr(optim, name) is not None):
            raise UserError(f"--optim.kwargs: remove {name!r}; set optim.{name.replace('_', '-')}.")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def norm_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The weights and biases of the normalisation layers: torch's kinds, and timm's, such as its own RmsNorm."""
    batch, instance = nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm
    kinds = (batch, instance, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    norms = [
        module
        for module in model.modules()
        if isinstance(module, kinds) or type(module).__module__.startswith("timm.layers.norm")
    ]
    return {parameter for norm in norms for parameter in norm.parameters(recurse=False)}


def _scale_head(optimizer: torch.optim.Optimizer, model: nn.Module, scale: float) -> None:
    """Give the parameters of the last layer groups of their own, with `lr_scale`, as layer decay has it."""
    heads = tuple(f"{head}." for head in required_classifier(model, "--optim.head-lr"))
    head = {parameter for name, parameter in model.named_parameters() if name.startswith(heads)}
    _separate(optimizer, head, {"lr_scale": scale}, at_end=False)


def _separate(
    optimizer: torch.optim.Optimizer,
    chosen: set[nn.Parameter],
    settings: dict[str, Any],
    *,
    at_end: bool = True,
) -> None:
    """Give the `chosen` parameters of each group a group of their own, with `settings`.

    New groups come after all others, or (not `at_end`) after the one that they are from. Their order must not change:
    a checkpoint has it, too.
    """
    groups: list[dict[str, Any]] = []
    last: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        rest = [parameter for parameter in group["params"] if parameter not in chosen]
        own = [parameter for parameter in group["params"] if parameter in chosen]
        if rest:
            groups.append({**group, "params": rest})
        if own:
            (last if rest and at_end else groups).append({**group, **settings, "params": own})
    optimizer.param_groups[:] = [*groups, *last]


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
