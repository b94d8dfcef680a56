"""torchvision's classifiers, named `torchvision/NAME`, for any number of classes and channels.

As in timm's names, published weights other than the newest are named after a dot: `torchvision/NAME.IMAGENET1K_V1`.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from accel_train.config.schema import Model
from accel_train.errors import UserError, nearest, reason_of
from accel_train.models.classifier import classifier_names
from accel_train.models.nets import TORCHVISION, without_none

# Models with a fixed input size, by the beginning of their name, and the argument that sets the size. Other models
# take images of any size.
SIZED = {"vit_": "image_size", "maxvit_": "input_size"}
# Functions that give their model a stochastic depth of their own, and fail if they get another one.
OWN_DEPTH = ("swin_", "maxvit_")
# Models whose published weights come from another library, and were trained with images normalised to -1..1.
HALF = ("googlenet", "inception_v3")
# What torchvision's function itself takes out of the arguments, of models that ignore those they do not know.
OF_FUNCTION = ("width_mult", "reduced_tail", "dilated")


def torchvision_names() -> list[str]:
    """All names, with the prefix."""
    import torchvision

    return [TORCHVISION + name for name in torchvision.models.list_models(module=torchvision.models)]


def architecture(name: str) -> str:
    """torchvision's own name of the model: without the prefix, and without the name of its weights."""
    return name.removeprefix(TORCHVISION).partition(".")[0]


def is_torchvisions(name: str) -> bool:
    """Whether torchvision has this model. Raises UserError if it has the model, but not the weights that are named."""
    found = name.startswith(TORCHVISION) and TORCHVISION + architecture(name) in torchvision_names()
    return found and published_weights(name) is not None


def published_weights(name: str) -> Any:
    """The published weights of a model that its name says, or its newest; `.transforms()` has their crop_size, mean and
    std. Raises UserError for an unknown name of weights."""
    import torchvision

    short = architecture(name)
    if TORCHVISION + short not in torchvision_names():
        raise UserError(f"torchvision has no model {short!r}.{nearest(TORCHVISION + short, torchvision_names())}")
    _, dot, wanted = name.partition(".")
    kinds = torchvision.models.get_model_weights(short)
    if dot and wanted not in kinds.__members__:
        known = [each.name for each in kinds]
        raise UserError(
            f"model.name: {TORCHVISION}{short} has no weights {wanted!r}.{nearest(wanted, known)} Its weights are "
            f"{', '.join(known)}."
        )
    return kinds[wanted or "DEFAULT"]


def published_normalization(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation that the published weights were trained with.

    torchvision gives the models in HALF another input and lets them convert it (transform_input). That is no weight: a
    model that begins from the weights of such a run would not have it. So no model has it here.
    """
    if architecture(name) in HALF:
        return (0.5,) * 3, (0.5,) * 3
    transforms = published_weights(name).transforms()
    return tuple(transforms.mean), tuple(transforms.std)


def size_argument(name: str) -> str | None:
    """The argument that sets the fixed input size of a model; None if the model takes any size."""
    return next((argument for start, argument in SIZED.items() if architecture(name).startswith(start)), None)


def create_torchvision(
    model: Model, num_classes: int, channels: int, image_size: int, more: dict[str, Any]
) -> nn.Module:
    """The model, with random weights. `more`: further arguments of torchvision's function."""
    import torchvision

    short = architecture(model.name)
    options = without_none(dropout=model.dropout)
    if not short.startswith(OWN_DEPTH):
        options |= without_none(stochastic_depth_prob=model.drop_path)
    if short.startswith("densenet") and "dropout" in options:
        options["drop_rate"] = options.pop("dropout")
    if short in HALF:  # without the auxiliary heads, which would make the output a tuple
        options |= {"aux_logits": False, "init_weights": True}
    if (argument := size_argument(model.name)) is not None:
        options[argument] = image_size if argument == "image_size" else (image_size, image_size)
    options |= more
    try:
        made: nn.Module = torchvision.models.get_model(short, num_classes=num_classes, **options)
    except (AssertionError, ValueError, RuntimeError) as error:
        if argument is None:
            raise
        raise UserError(f"{model.name}: model.image_size {image_size} does not fit: {reason_of(error)}.") from error
    _check_arguments(made, options)
    if short.startswith(OWN_DEPTH) and model.drop_path is not None:
        _set_depth(made, model.drop_path)
    if channels != 3:
        _adapt_stem(made, channels)
    return made


def _check_arguments(model: nn.Module, options: dict[str, Any]) -> None:
    """Raise TypeError for `options` that the model's class accepts and ignores, such as ConvNeXt for a dropout."""
    known = inspect.signature(type(model)).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        for name in options.keys() - known.keys() - {*OF_FUNCTION}:
            raise TypeError(f"{type(model).__name__} ignores the unexpected keyword argument {name!r}")


def _set_depth(model: nn.Module, rate: float) -> None:
    """Let the rates of stochastic depth rise from 0 to `rate` at the last block, as the model's own rise to its own."""
    from torchvision.ops import StochasticDepth

    drops = [module for module in model.modules() if isinstance(module, StochasticDepth)]
    last = max(drop.p for drop in drops)
    for drop in drops:
        drop.p = rate * (drop.p / last)


def _adapt_stem(model: nn.Module, channels: int) -> None:
    """Let the first convolution take `channels`, with weights that timm makes from its own."""
    from timm.models import adapt_input_conv

    stem = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    stem.weight, stem.in_channels = nn.Parameter(adapt_input_conv(channels, stem.weight.detach())), channels


def load_published(model: nn.Module, name: str) -> None:
    """Load the published weights of `name`, except a last layer for another number of classes, which keeps its random
    weights. Raises OSError if they cannot be fetched."""
    from timm.models import adapt_input_conv

    state: dict[str, Tensor] = published_weights(name).get_state_dict(progress=False, check_hash=True)
    own = model.state_dict()
    heads = tuple(f"{head}." for head in classifier_names(model))
    loaded = {}
    for key, value in state.items():
        if key not in own:  # an auxiliary head
            continue
        if value.ndim == 4 and value.shape[1] == 3 != own[key].shape[1]:
            value = adapt_input_conv(own[key].shape[1], value)
        if value.shape == own[key].shape:
            loaded[key] = value
    unfit = [key for key in own if key not in loaded and not key.startswith(heads)]
    if unfit:
        raise UserError(f"{name}: its published weights do not fit this model.image_size ({unfit[0]}); leave it out.")
    model.load_state_dict(own | loaded)
