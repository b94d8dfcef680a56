"""A model by its name: timm's, `torchvision/NAME`, or one of the nets in `nets.py`.

As in timm's names, published weights of torchvision other than the newest are named after a dot:
`torchvision/NAME.IMAGENET1K_V1`.

timm and torchvision are imported where they are used: together they take seconds.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn

from accel_train.config.schema import Config, Model, Origin
from accel_train.errors import UserError, nearest, reason_of
from accel_train.keyed import key
from accel_train.models.classifier import find_classifier, freeze
from accel_train.models.nets import NETS, TORCHVISION, without_none
from accel_train.models.weights import Weights, load_into, load_state
from accel_train.models.wrapping import logits_of
from accel_train.user_code import Reference, parse_reference, short_name

NO_ORIGIN = Origin()
PUBLISHED_ARGUMENTS: dict[str, dict[str, Any]] = {"fbnetc_100": {"bn_eps": 1e-3}}
"""Arguments that timm gives a model only together with its published weights. Here the model always has them, because
later runs begin from these weights, too."""
# Models with a fixed input size, by the beginning of their name, and the argument that sets the size. Other models
# take images of any size.
SIZED = {"vit_": "image_size", "maxvit_": "input_size"}
# Not taken: they return a tuple in training, and change their input if they have published weights.
AUXILIARY = ("googlenet", "inception_v3")
# What torchvision's function itself takes out of the arguments, of models that ignore those they do not know.
OF_FUNCTION = ("width_mult", "reduced_tail", "dilated")


def input_size(model: Model, native: int | None, origin: Origin = NO_ORIGIN) -> int:
    """Height and width, in pixels, of the images that `model` takes.

    `native` is the size of the data's images, None if they differ. In this order: what model.image_size says,
    the size of the published weights (or those of `origin`) if they are used, a transformer's own size if
    it has only one, the data's, 224.
    """
    _check_name(model)
    if model.image_size is not None:
        return model.image_size
    if origin.image_size is not None:
        return origin.image_size
    if model.name.startswith(TORCHVISION):
        if model.pretrained:
            return int(published_weights(model.name).transforms().crop_size[0])
        return 224 if size_argument(model.name) else native or 224
    if is_timms(model.name):
        described = _timm_config(model.name)
        if model.pretrained or described.fixed_input_size:
            return int(described.input_size[-1])
    return native or 224


def pretrained_normalization(model: Model) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and standard deviation (in 0..1, of three channels) that the published weights were trained with.

    None if the model does not start from published weights.
    """
    _check_name(model)
    if not model.pretrained:
        return None
    if model.name.startswith(TORCHVISION):
        transforms = published_weights(model.name).transforms()
        return tuple(transforms.mean), tuple(transforms.std)
    described = _timm_config(model.name)
    return tuple(described.mean), tuple(described.std)


def create_model(
    model: Model,
    *,
    num_classes: int,
    channels: int,
    image_size: int,
    pretrained: bool = True,
) -> nn.Module:
    """The model: float images [b, channels, image_size, image_size] to logits [b, num_classes]; on the CPU.

    Weights are drawn from torch's global random generator, or are the published ones: then the first
    convolution is summed over colours for grey images, and a last layer for another number of classes is made
    new. What is frozen (classifier.py) requires no gradients; call `set_train_mode` rather than `.train()`.

    Without `pretrained` no weights are fetched, whatever model.pretrained says: for a model whose own are loaded next.

    Published weights are downloaded by each process that finds them missing from the cache: let one go first.
    Raises UserError for an unknown name, an option or a size of image that the model does not take, and
    weights that do not exist or cannot be fetched.
    """
    _check_name(model)
    reference = parse_reference("model.name", model.name)
    if reference is not None:
        return _create_users(model, reference, num_classes, channels, image_size)
    try:
        if model.name in NETS:
            options = without_none(dropout=model.dropout, drop_path=model.drop_path, **more_arguments(model))
            made = NETS[model.name](num_classes, channels, image_size, **options)
        elif model.name.startswith(TORCHVISION):
            made = create_torchvision(model, num_classes, channels, image_size, more_arguments(model))
            if model.pretrained and pretrained:
                find_classifier(made, num_classes)
                state = published_weights(model.name).get_state_dict(progress=False, check_hash=True)
                load_state(made, state, Weights(Path(), model.name, None), [""] * num_classes, channels)
        else:
            made = _create_timm(model, num_classes, channels, image_size, pretrained)
    except (TypeError, LookupError, AttributeError) as error:
        asked = [key for key in ("dropout", "drop_path", "kwargs") if getattr(model, key) is not None]
        if not asked or ("keyword argument" not in str(error) and not model.kwargs):
            raise
        settings = " or ".join(f"model.{key}" for key in asked)
        reason = f"{error} is unknown" if isinstance(error, KeyError) else error
        raise UserError(f"{model.name} does not take {settings} ({reason}); leave it out.") from error
    except OSError as error:
        if not model.pretrained:
            raise
        raise UserError(
            f"model.pretrained: the weights of {model.name} could not be fetched ({reason_of(error)}). Run this once "
            f"where there is a network, with the same HF_HOME and TORCH_HOME, such as on the login node: "
            f"{_download_command(model.name)}"
        ) from error
    check_forward(made, model.name, channels, image_size)
    find_classifier(made, num_classes)
    return _with_settings(made, model, channels)


def create_new_model(
    config: Config,
    accelerator: Accelerator,
    classes: Sequence[str],
    channels: int,
    size: int,
    weights: Weights | None,
    *,
    pretrained: bool,
) -> tuple[nn.Module, str]:
    """The model on the device, and which `weights` were loaded ("" for None).

    Weights that are not loaded or published follow from the seed alone.
    """
    fetches = config.model.pretrained and pretrained
    with accelerator.main_process_first() if fetches else nullcontext():  # one process downloads
        torch.manual_seed(key(config.seed, "weights"))
        model = create_model(
            config.model,
            num_classes=len(classes),
            channels=channels,
            image_size=size,
            pretrained=pretrained,
        )
    loaded = ""
    if weights is not None:
        loaded = load_into(model, weights, classes, channels)
    return model.to(accelerator.device), loaded


def _with_settings(made: nn.Module, model: Model, channels: int) -> nn.Module:
    if model.eval_image_size is not None:
        check_forward(made, short_name("model.name", model.name), channels, model.eval_image_size, "eval_image_size")
    if model.gradient_checkpointing:
        _checkpoint_gradients(made, short_name("model.name", model.name))
    if model.freeze or model.freeze_body:
        freeze(made, model)
    return made


def _create_users(model: Model, reference: Reference, num_classes: int, channels: int, image_size: int) -> nn.Module:
    """The model that the user's own function returns, tried with an image."""
    from accel_train.user_code import call, load, showing_user_lines

    for name in ("dropout", "drop_path"):
        if getattr(model, name) is not None:
            raise UserError(f"model.{name}: is not passed to {reference.short}; give its argument by model.kwargs.")
    where = f"--model.name {reference.short}"
    given = {"num_classes": num_classes, "in_chans": channels, "image_size": image_size}
    made = call("model.name", reference, load("model.name", reference), given, json.loads(model.kwargs or "{}"))
    if not isinstance(made, nn.Module):
        raise UserError(f"{where}: returned a value of type {type(made).__name__}; expected a torch.nn.Module.")
    made.eval()
    with showing_user_lines("model.name", reference), torch.no_grad():
        logits = logits_of(made, torch.zeros(1, channels, image_size, image_size))
    if not isinstance(logits, torch.Tensor) or logits.shape != (1, num_classes):
        found = list(logits.shape) if isinstance(logits, torch.Tensor) else f"a value of type {type(logits).__name__}"
        raise UserError(
            f"{where}: computed {found} from an image {[1, channels, image_size, image_size]}; expected logits of the "
            f"{num_classes} classes, [1, {num_classes}]."
        )
    find_classifier(made, num_classes)
    return _with_settings(made.train(), model, channels)


def more_arguments(model: Model) -> dict[str, Any]:
    """The arguments that model.kwargs adds to those of a library's model.

    Raises UserError for those that follow from the data or from other settings.
    """
    arguments: dict[str, Any] = json.loads(model.kwargs or "{}")
    reserved = {"num_classes": "it follows from the data", "in_chans": "it follows from the data"}
    reserved |= {"image_size": "set --model.image-size", "pretrained": "set --model.pretrained"}
    # A file or an address of weights: --model.weights reads one without running code that is in it.
    files = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "weights", "weights_backbone")
    reserved |= dict.fromkeys(files, "set --model.weights or --model.pretrained")
    for name in reserved.keys() & arguments.keys():
        raise UserError(f"--model.kwargs: remove {name!r}; {reserved[name]}.")
    return arguments


def _check_name(model: Model) -> None:
    """Raise UserError if no library has a model of this name, or if published weights are wanted and do not exist."""
    published = False
    if model.name not in NETS and parse_reference("model.name", model.name) is None:
        published = is_torchvisions(model.name) or _check_timm_name(model.name, torchvision_names())
    if model.pretrained and not published:
        raise UserError(f"model.pretrained: {model.name} has no published weights; set it to false.")


def _check_timm_name(name: str, torchvisions: list[str]) -> bool:
    """Whether timm's model `name` has published weights. Raises UserError if there is none of this name."""
    import timm

    if name.startswith(TORCHVISION) or not timm.is_model(name):
        known = [*NETS, *torchvisions, *timm.list_models()]
        near = [TORCHVISION + name] if TORCHVISION + name in torchvisions else known
        raise UserError(
            f"model.name: unknown model {name!r}.{nearest(name, near, count=5)} There are {', '.join(NETS)}, "
            f"torchvision's as {TORCHVISION}NAME, all of timm.list_models(), and your own as FILE.py:FUNCTION."
        )
    return bool(_timm_config(name).has_weights)


def is_timms(name: str) -> bool:
    """Whether `name` is in timm's list of models."""
    own = name in NETS or parse_reference("model.name", name) is not None
    return not own and not name.startswith(TORCHVISION)


def _download_command(name: str) -> str:
    """The command that puts the published weights of a model into the cache."""
    if name.startswith(TORCHVISION):
        short, _, weights = name.removeprefix(TORCHVISION).partition(".")
        call = f"get_model({short!r}, weights={weights or 'DEFAULT'!r})"
        return f'python -c "from torchvision.models import get_model; {call}"'
    if repository := _timm_config(name).hf_hub_id:
        return f"hf download {repository}"
    return f"""python -c "import timm; timm.create_model('{name}', pretrained=True)\""""


def _timm_config(name: str) -> Any:
    """timm's description of the model and its weights: the weights of the tag in `name`, or the default ones."""
    import timm

    try:
        return timm.models.get_pretrained_cfg(name, allow_unregistered=False)
    except RuntimeError as error:
        base, _, tag = name.partition(".")
        known = timm.list_pretrained(f"{base}.*")
        raise UserError(f"model.name: {base} has no weights {tag!r}.{nearest(name, known, count=5)}") from error


def _create_timm(model: Model, num_classes: int, channels: int, image_size: int, pretrained: bool) -> nn.Module:
    import timm

    own = without_none(drop_rate=model.dropout, drop_path_rate=model.drop_path) | more_arguments(model)
    options = PUBLISHED_ARGUMENTS.get(model.name.partition(".")[0], {}) | own
    described = _timm_config(model.name)
    sized = described.fixed_input_size and image_size != described.input_size[-1]
    if sized:
        options["img_size"] = image_size
    try:
        made = timm.create_model(
            model.name,
            pretrained=model.pretrained and pretrained,
            num_classes=num_classes,
            in_chans=channels,
            **options,
        )
    except (AssertionError, TypeError, ValueError, RuntimeError) as error:
        if not sized or (isinstance(error, TypeError) and "img_size" not in str(error)):
            raise
        raise _unfit(model.name, image_size, error) from error
    return cast(nn.Module, made)


def check_forward(model: nn.Module, name: str, channels: int, image_size: int, option: str = "image_size") -> None:
    """Run one image through the model, so that an impossible image size is an error now, which names the model."""
    model.eval()
    try:
        with torch.no_grad():
            model(torch.zeros(1, channels, image_size, image_size))
    except (AssertionError, ValueError, RuntimeError) as error:
        raise _unfit(name, image_size, error, option) from error
    model.train()


def _unfit(name: str, image_size: int, error: Exception, option: str = "image_size") -> UserError:
    return UserError(
        f"{name} does not take images of {image_size}x{image_size} ({reason_of(error)}); "
        f"give another model.{option}, or leave it out."
    )


def _checkpoint_gradients(model: nn.Module, name: str) -> None:
    refused = UserError(
        f"model.gradient_checkpointing: {name} does not support it; set it to false, or choose another model of timm's."
    )
    if not hasattr(model, "set_grad_checkpointing"):
        raise refused
    try:
        cast(Any, model).set_grad_checkpointing(True)
    except AssertionError as error:  # so timm says that a model does not support it
        raise refused from error


def torchvision_names() -> list[str]:
    """All names, with the prefix."""
    import torchvision

    names = torchvision.models.list_models(module=torchvision.models)
    return [TORCHVISION + name for name in names if name not in AUXILIARY]


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
    _, dot, wanted = name.partition(".")
    kinds = torchvision.models.get_model_weights(short)
    if dot and wanted not in kinds.__members__:
        known = [each.name for each in kinds]
        raise UserError(
            f"model.name: {TORCHVISION}{short} has no weights {wanted!r}.{nearest(wanted, known)} Its weights are "
            f"{', '.join(known)}."
        )
    return kinds[wanted or "DEFAULT"]


def size_argument(name: str) -> str | None:
    """The argument that sets the fixed input size of a model; None if the model takes any size."""
    return next((argument for start, argument in SIZED.items() if architecture(name).startswith(start)), None)


def create_torchvision(
    model: Model, num_classes: int, channels: int, image_size: int, more: dict[str, Any]
) -> nn.Module:
    """The model, with random weights. `more`: further arguments of torchvision's function."""
    import torchvision

    short = architecture(model.name)
    options = without_none(dropout=model.dropout, stochastic_depth_prob=model.drop_path)
    if short.startswith("densenet") and "dropout" in options:
        options["drop_rate"] = options.pop("dropout")
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
    if channels != 3:
        _adapt_stem(made, channels)
    return made


def _check_arguments(model: nn.Module, options: dict[str, Any]) -> None:
    """Raise TypeError for `options` that the model's class accepts and ignores, such as ConvNeXt for a dropout."""
    known = inspect.signature(type(model)).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        for name in options.keys() - known.keys() - {*OF_FUNCTION}:
            raise TypeError(f"{type(model).__name__} ignores the unexpected keyword argument {name!r}")


def _adapt_stem(model: nn.Module, channels: int) -> None:
    """Let the first convolution take `channels`, with weights that timm makes from its own."""
    from timm.models import adapt_input_conv

    stem = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    stem.weight, stem.in_channels = nn.Parameter(adapt_input_conv(channels, stem.weight.detach())), channels
