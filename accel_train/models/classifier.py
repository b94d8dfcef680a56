"""The classifier of a model, the layers that compute its logits; and layers that are frozen: the body, or some by their
names, for the whole run or at first.

A layer that is frozen for the whole run gets no gradients. One that is trained after model.freeze-epochs gets them from
the beginning, because DDP must know all parameters that will ever have some; until then they are thrown away before the
optimizer sees them. So the optimizer's state of such a layer begins with its first step.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

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


def find_classifier(model: nn.Module, classes: int, channels: int, image_size: int) -> None:
    """Find the classifier of a model without get_classifier(), and note it in the model for `classifier_names`.

    It is the last called module that holds parameters itself, gives [batch, classes] or [batch, classes, h, w], and is
    followed by nothing that mixes classes: only by pooling, flattening, activations, or a scale of the logits, whose
    own modules then belong to it. `model`: before weights are loaded, which may give each class another scale.
    """
    if _own_answer(model):
        return
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            setattr(model, NAMES, _last_layers(model, classes, channels, image_size))
    finally:
        for module in training:
            module.training = True


def _own_answer(model: nn.Module) -> tuple[str, ...]:
    """The names of what the model's own get_classifier() returns; () if there is none, or nothing with parameters."""
    if not callable(own := getattr(model, "get_classifier", None)):
        return ()
    answer: Any = own()
    chosen = answer if isinstance(answer, (tuple, list)) else [answer]
    names = {module: name for name, module in model.named_modules() if name}
    return tuple(names[each] for each in chosen if each in names and any(True for _ in each.parameters()))


def _last_layers(model: nn.Module, classes: int, channels: int, image_size: int) -> tuple[str, ...]:
    images = torch.randn(2, channels, image_size, image_size, generator=torch.Generator().manual_seed(0), device="cpu")
    images = images.to(next((parameter.device for parameter in model.parameters()), images.device))
    called: dict[nn.Module, Any] = {}  # in the order of the last calls, with the shape of the output

    def enter(module: nn.Module, _: Any) -> None:
        called.pop(module, None)
        called[module] = None

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        called[module] = output.shape if isinstance(output, Tensor) else None

    layers = {
        module: name
        for name, module in model.named_modules()
        if name and 0 < len([*module.parameters(recurse=False)]) == len([*module.parameters()])
    }
    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    hooks += [layer.register_forward_hook(leave) for layer in layers]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    names: list[str] = []
    for layer, shape in reversed(called.items()):
        if shape is None or shape[:2] != (2, classes) or len(shape) not in (2, 4):
            break
        if not _is_followed_by_nothing(model, layer, images, shape):
            break
        names.insert(0, layers[layer])
    return tuple(names)


def _is_followed_by_nothing(model: nn.Module, layer: nn.Module, images: Tensor, shape: torch.Size) -> bool:
    """Whether the logits follow from the output of `layer` alone, each class's from its own part: with the output of
    the second image put in place that is the first one's, with the classes in another order, so are the logits."""
    if images.is_meta:  # there are no values to compare: the model was made to count what it has
        return True
    one = torch.rand(shape[1:], generator=torch.Generator().manual_seed(1))
    both = torch.stack([one, one.roll(1, 0)])
    hook = layer.register_forward_hook(lambda _, inputs, output: both.to(output))
    try:
        logits = model(images)
    finally:
        hook.remove()
    return torch.allclose(logits[0].roll(1, 0), logits[1], atol=1e-6) and not torch.allclose(logits[0], logits[1])


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
