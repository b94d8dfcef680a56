"""Layers that are not trained: the whole body, or some by their names; for the whole run, or at first.

A layer that is frozen for the whole run gets no gradients. One that is trained after model.freeze-epochs gets them from
the beginning, because DDP must know all parameters that will ever have some; until then they are thrown away before the
optimizer sees them. So the optimizer's state of such a layer begins with its first step.
"""

from __future__ import annotations

from itertools import chain

from torch import nn

from accel_train.config.schema import Model
from accel_train.errors import UserError, nearest
from accel_train.models.classifier import required_classifier
from accel_train.models.wrapping import plain_name, unwrap_model


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
    names = [plain_name(name) for name, _ in chain(model.named_parameters(), model.named_buffers())]
    if settings.freeze_body:
        heads = tuple(f"{head}." for head in required_classifier(model, "--model.freeze-body"))
        chosen = {name for name in names if not name.startswith(heads)}
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
