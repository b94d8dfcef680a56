"""The first and the last layer of a model, and training the last one alone."""

from __future__ import annotations

from torch import nn

from accel_train.config.schema import Model
from accel_train.errors import UserError


def classifier_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that compute the logits, such as ("fc",); distilled DeiT has two."""
    published = getattr(model, "pretrained_cfg", None) or {}  # timm's models list them
    names = published.get("classifier")
    if names:
        return (names,) if isinstance(names, str) else tuple(names)
    layers = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    return (layers[-1],)


def input_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that take the images, such as ("conv1",) or ("patch_embed.proj",)."""
    published = getattr(model, "pretrained_cfg", None) or {}
    names = published.get("first_conv")
    if names:
        return (names,) if isinstance(names, str) else tuple(names)
    layers = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    return (layers[0],)


def freeze_body(model: nn.Module) -> None:
    """Let only the parameters of the classifier require gradients."""
    heads = classifier_names(model)
    for name, parameter in model.named_parameters():
        in_head = any(name.startswith(f"{head}.") for head in heads)
        parameter.requires_grad_(in_head and parameter.requires_grad)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("model.freeze_body leaves nothing to train: this model has no last layer of its own.")


def set_train_mode(model: nn.Module, settings: Model) -> None:
    """`model.train()`, but the normalisation of a frozen body stays in evaluation mode; `model` may be wrapped.

    train() itself would let BatchNorm go on counting its running statistics, whether its weights are frozen
    or not.
    """
    model.train()
    if settings.freeze_body:
        for module in model.modules():
            if any(name.startswith("running_") for name, _ in module.named_buffers(recurse=False)):
                module.eval()
