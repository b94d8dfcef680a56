"""Layers that are not trained: the whole body, or some by their names or their depth; for the whole run, or at first.

A layer that is frozen for the whole run gets no gradients. One that is trained after model.freeze-epochs gets them from
the beginning, because DDP must know all parameters that will ever have some; until then they are thrown away before the
optimizer sees them. So the optimizer's state of such a layer begins with its first step.
"""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

from timm.models import group_parameters
from torch import nn

from accel_train.config.schema import Model
from accel_train.errors import UserError, nearest
from accel_train.models.classifier import required_classifier
from accel_train.models.wrapping import plain_name, unwrap_model

Layers = list[frozenset[str]]
"""The names of the parameters and buffers of each layer, from the input to the output."""


def freeze(model: nn.Module, settings: Model) -> None:
    """Let the parameters that stay frozen for the whole run require no gradients.

    Raises UserError if model.freeze names what the model does not have, and if nothing is left to train.
    """
    frozen = _first_frozen(model, settings)
    if not any(parameter.requires_grad and name not in frozen for name, parameter in model.named_parameters()):
        if settings.freeze_body:
            raise UserError("model.freeze_body leaves nothing to train: this model has no last layer of its own.")
        raise UserError("model.freeze leaves nothing to train: leave out the layers that are to be trained.")
    if settings.freeze_epochs is None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name not in frozen)


def keep_frozen(model: nn.Module, settings: Model, epoch: int) -> None:
    """In a model in training mode, let the layers that are frozen in `epoch`, counted from 0, keep their statistics;
    mark their parameters for `drop_frozen_gradients`. `model` may be wrapped.

    train() lets BatchNorm go on counting its running statistics, whether its weights are frozen or not.
    """
    bare = unwrap_model(model)
    frozen = frozen_names(bare, settings, epoch)
    for name, module in bare.named_modules():
        buffers = [f"{plain_name(name)}.{buffer}".lstrip(".") for buffer, _ in module.named_buffers(recurse=False)]
        if any("running_" in buffer and buffer in frozen for buffer in buffers):
            module.eval()
    for name, parameter in bare.named_parameters():
        parameter.is_frozen = plain_name(name) in frozen  # type: ignore[attr-defined]


def frozen_names(model: nn.Module, settings: Model, epoch: int) -> frozenset[str]:
    """The parameters and buffers of a model, which is not wrapped, that are frozen in `epoch`, counted from 0."""
    if settings.freeze_epochs is None or epoch < settings.freeze_epochs:
        return _first_frozen(model, settings)
    return frozenset()


def drop_frozen_gradients(model: nn.Module) -> None:
    """Remove the gradients of the layers that are frozen in this epoch: the optimizer leaves out what has none."""
    for parameter in model.parameters():
        if parameter.is_frozen:  # type: ignore[attr-defined]  # by `keep_frozen`
            parameter.grad = None


def _first_frozen(model: nn.Module, settings: Model) -> frozenset[str]:
    """The parameters and buffers that are frozen at first."""
    layers = _layers(model)
    names = [name for layer in layers for name in layer]
    if settings.freeze_body:
        heads = tuple(f"{head}." for head in required_classifier(model, "--model.freeze-body"))
        chosen = {name for name in names if not name.startswith(heads)}
    elif len(settings.freeze) == 1 and settings.freeze[0].isdecimal():
        count = int(settings.freeze[0])
        if not 0 < count < len(layers):
            raise UserError(
                f"model.freeze: expected the names of layers, or a number from 1 to {len(layers) - 1} (this model has "
                f"{len(layers)} layers), found '{count}'."
            )
        chosen = {name for layer in layers[:count] for name in layer}
    else:
        chosen = set()
        for asked in settings.freeze:
            found = {name for name in names if name == asked or name.startswith(f"{asked}.")}
            if not found:
                parts = [name.split(".") for name in names]
                known = dict.fromkeys(".".join(part[:end]) for part in parts for end in range(1, len(part) + 1))
                raise UserError(
                    f"model.freeze: this model has no layer '{asked}'.{nearest(asked, known)} Its layers, from the "
                    f"input: {', '.join(dict.fromkeys(name.partition('.')[0] for name in names))}."
                )
            chosen |= found
    return frozenset(chosen)


def _layers(model: nn.Module) -> Layers:
    """All layers of a model: those in which timm divides its own, else the modules at the top of the model."""
    names = [plain_name(name) for name, _ in chain(model.named_parameters(), model.named_buffers())]
    if hasattr(model, "group_matcher"):
        matcher: Any = model.group_matcher
        named: Any = SimpleNamespace(named_parameters=lambda: ((name, None) for name in names))  # and buffers
        groups = group_parameters(named, matcher(coarse=True))
        return [frozenset(groups[number]) for number in sorted(groups)]
    prefix, children = "", [*model.named_children()]
    while len(children) == 1:  # a model that only wraps another one
        prefix, children = f"{prefix}{children[0][0]}.", [*children[0][1].named_children()]
    tops = dict.fromkeys(name.removeprefix(prefix).partition(".")[0] for name in names)
    order = [name for name, _ in children if name in tops]
    order += [top for top in tops if top not in order]  # parameters of the model itself
    return [frozenset(n for n in names if n.removeprefix(prefix).partition(".")[0] == top) for top in order]
