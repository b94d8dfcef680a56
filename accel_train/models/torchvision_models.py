"""torchvision's classifiers, named `torchvision/NAME`, for any number of classes and channels."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from accel_train.config.schema import Model
from accel_train.errors import UserError, reason_of
from accel_train.models.freezing import classifier_names

PREFIX = "torchvision/"
# Models with a fixed input size, by the beginning of their name, and the argument that sets the size. Other models
# take images of any size.
SIZED = {"vit_": "image_size", "maxvit_": "input_size"}


def torchvision_names() -> list[str]:
    """All names, with the prefix."""
    import torchvision

    return [PREFIX + name for name in torchvision.models.list_models(module=torchvision.models)]


def published_weights(name: str) -> Any:
    """The newest published weights of a model; `.transforms()` has their crop_size, mean and std."""
    import torchvision

    return torchvision.models.get_model_weights(name.removeprefix(PREFIX)).DEFAULT


def size_argument(name: str) -> str | None:
    """The argument that sets the fixed input size of a model; None if the model takes any size."""
    short = name.removeprefix(PREFIX)
    return next((argument for start, argument in SIZED.items() if short.startswith(start)), None)


def without_none(**arguments: Any) -> dict[str, Any]:
    """The arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


def create_torchvision(
    model: Model, num_classes: int, channels: int, image_size: int, published: bool, more: dict[str, Any]
) -> nn.Module:
    """The model, with its published weights if model.pretrained and `published`; OSError if they cannot be fetched.

    `more`: further arguments of torchvision's function.
    """
    import torchvision

    short = model.name.removeprefix(PREFIX)
    options = without_none(dropout=model.dropout, stochastic_depth_prob=model.drop_path)
    if short.startswith("densenet") and "dropout" in options:
        options["drop_rate"] = options.pop("dropout")
    if short in ("googlenet", "inception_v3"):
        # Without the auxiliary heads, which would make the output a tuple. The published weights, which come
        # from another library, were trained on images with another normalisation: transform_input corrects
        # that.
        transform = model.pretrained and channels == 3
        options |= {"aux_logits": False, "init_weights": True, "transform_input": transform}
    if (argument := size_argument(model.name)) is not None:
        options[argument] = image_size if argument == "image_size" else (image_size, image_size)
    options |= more
    try:
        made: nn.Module = torchvision.models.get_model(short, num_classes=num_classes, **options)
    except (AssertionError, ValueError, RuntimeError) as error:
        if argument is None:
            raise
        raise UserError(f"{model.name}: model.image_size {image_size} does not fit: {reason_of(error)}.") from error
    if channels != 3:
        _replace_stem(made, channels)
    if model.pretrained and published:
        state = published_weights(model.name).get_state_dict(progress=False, check_hash=True)
        _load_published(made, state, model.name)
    return made


def _replace_stem(model: nn.Module, channels: int) -> None:
    """Replace the first convolution by one with `channels` input channels."""
    name, old = next((name, item) for name, item in model.named_modules() if isinstance(item, nn.Conv2d))
    new = nn.Conv2d(
        channels,
        old.out_channels,
        cast(Any, old.kernel_size),
        cast(Any, old.stride),
        cast(Any, old.padding),
        bias=old.bias is not None,
    )
    with torch.no_grad():
        new.weight.copy_(_adapt_channels(old.weight, channels))
        if old.bias is not None and new.bias is not None:
            new.bias.copy_(old.bias)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)


def _adapt_channels(weight: Tensor, channels: int) -> Tensor:
    """Weights [out, 3, h, w] of a first convolution for another number of channels.

    For one channel their sum (a grey image is three equal colours); for more, the colours in turn, scaled so
    that the sum over channels stays.
    """
    if channels == 1:
        return weight.sum(dim=1, keepdim=True)
    return weight[:, [channel % 3 for channel in range(channels)]] * (3 / channels)


def _load_published(model: nn.Module, state: dict[str, Tensor], name: str) -> None:
    """Load `state`, except a last layer for another number of classes, which keeps its random weights."""
    own = model.state_dict()
    heads = tuple(f"{head}." for head in classifier_names(model))
    loaded = {}
    for key, value in state.items():
        if key not in own:  # an auxiliary head
            continue
        if value.ndim == 4 and value.shape[1] == 3 != own[key].shape[1]:
            value = _adapt_channels(value, own[key].shape[1])
        if value.shape == own[key].shape:
            loaded[key] = value
    unfit = [key for key in own if key not in loaded and not key.startswith(heads)]
    if unfit:
        raise UserError(f"{name}: its published weights do not fit this model.image_size ({unfit[0]}); leave it out.")
    model.load_state_dict(own | loaded)
