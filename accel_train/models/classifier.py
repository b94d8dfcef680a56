"""The classifier of a model, the layers that compute its logits; and layers that are frozen: the body, or some by their
names, for the whole run or at first.

A layer that is frozen for the whole run gets no gradients. One that is trained after model.freeze-epochs gets them from
the beginning, because DDP must know all parameters that will ever have some; until then they are thrown away before the
optimizer sees them. So the optimizer's state of such a layer begins with its first step.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import nn

from accel_train.config.schema import Model
from accel_train.errors import UserError, nearest
from accel_train.models.wrapping import plain_name, unwrap_model

NAMES = "_classifier_names"
"""The attribute of a model that `find_classifier` sets."""


def classifier_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that compute the logits, such as ("fc",); distilled DeiT has two. () if nobody knows them.

    They are those of the model's own get_classifier(), else those that `find_classifier` has found. `model` is not
    wrapped.
    """
    names: tuple[str, ...] = getattr(model, NAMES, ()) or _own_answer(model)
    return names


def required_classifier(model: nn.Module, option: str) -> tuple[str, ...]:
    """As `classifier_names`. Raises UserError if there are none, which names the `option` that needs them."""
    if names := classifier_names(model):
        return names
    raise UserError(
        f"{option}: needs the last layer, but it is not known which layer of this model computes the logits; give the "
        "model a method get_classifier() that returns this layer."
    )


def find_classifier(model: nn.Module, classes: int) -> None:
    """Find the classifier of a model without get_classifier(), and note it in the model for `classifier_names`.

    It is the last registered module that holds parameters itself, if that is a linear layer or a convolution with an
    output for each of the `classes`.
    """
    if _own_answer(model):
        return
    layers = [(name, module) for name, module in model.named_modules() if [*module.parameters(recurse=False)]]
    name, last = layers[-1] if layers else ("", None)
    is_known = isinstance(last, (nn.Linear, nn.Conv2d)) and len(last.weight) == classes
    setattr(model, NAMES, (name,) if name and is_known else ())


def _own_answer(model: nn.Module) -> tuple[str, ...]:
    """The names of what the model's own get_classifier() returns; () if there is none, or nothing with parameters."""
    if not callable(own := getattr(model, "get_classifier", None)):
        return ()
    answer: Any = own()
    chosen = answer if isinstance(answer, (tuple, list)) else [answer]
    names = {module: name for name, module in model.named_modules() if name}
    return tuple(names[each] for each in chosen if each in names and any(True for _ in each.parameters()))


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


def set_train_mode(model: nn.Module, settings: Model, epoch: int = 0) -> None:
    """`model.train()`, but what is frozen in `epoch`, counted from 0, stay as they are. `model` may be wrapped.

    train() would let BatchNorm go on counting its running statistics, whether its weights are frozen or not.
    """
    model.train()
    if settings.freeze or settings.freeze_body:
        _keep_frozen(unwrap_model(model), settings, epoch)


def _keep_frozen(model: nn.Module, settings: Model, epoch: int) -> None:
    """Let the layers that are frozen in `epoch` keep their statistics; mark their parameters for
    `drop_frozen_gradients`."""
    frozen = frozen_names(model, settings, epoch)
    for name, module in model.named_modules():
        buffers = [f"{plain_name(name)}.{buffer}".lstrip(".") for buffer, _ in module.named_buffers(recurse=False)]
        if any("running_" in buffer and buffer in frozen for buffer in buffers):
            module.eval()
    for name, parameter in model.named_parameters():
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
