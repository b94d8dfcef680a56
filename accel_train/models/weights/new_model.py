"""The model of a new run, on its device, with the weights that it begins from.

These may be of a model with other classes, another number of channels or another image size. Their files may come from
anywhere: they are read without running any code that may be in them.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from accelerate import Accelerator
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn

from accel_train.config.schema import Config, Model
from accel_train.errors import UserError, first_of, one_line, reason_of
from accel_train.keyed import key
from accel_train.models.factory import check_forward, create_model
from accel_train.models.wrapping import classifier_names, input_names
from accel_train.untrusted import open_regular_file
from accel_train.user_code.reference import short_name


def create_new_model(
    config: Config,
    accelerator: Accelerator,
    classes: Sequence[str],
    channels: int,
    size: int,
    weights: Weights | None,
    *,
    published: bool,
) -> tuple[nn.Module, tuple[str, ...], str]:
    """The model on the device, warnings, and which `weights` were loaded ("" for None).

    Weights that are not loaded or published follow from the seed alone.
    """
    fetches = config.model.pretrained and published
    with accelerator.main_process_first() if fetches else nullcontext():  # one process downloads
        torch.manual_seed(key(config.seed, "weights"))
        model = create_model(
            config.model,
            num_classes=len(classes),
            channels=channels,
            image_size=size,
            published=published,
            origin=config.origin,
        )
    for smaller in config.model.progressive_sizes:
        check_forward(model, short_name("model.name", config.model.name), channels, smaller, "progressive_sizes")
    remaps = config.model.remap_classes
    loaded = load_into(model, weights, classes, channels, remaps=remaps) if weights is not None else ""
    _set_head(model, config.model)
    model = model.to(accelerator.device)
    if not config.model.sync_batchnorm:
        return model, (), loaded
    if accelerator.device.type == "cuda":  # torch supports it only on GPUs
        return convert_sync_batchnorm(model), (), loaded
    kind = accelerator.device.type
    return model, (f"model.sync_batchnorm: not available on {kind}; BatchNorm counts over virtual batches",), loaded


@torch.no_grad()
def _set_head(model: nn.Module, settings: Model) -> None:
    """Scale the last layer, and set its bias, as timm's train.py does: after weights are loaded, whatever they are."""
    for name in classifier_names(model):
        head = model.get_submodule(name)
        if settings.head_init_scale is not None:
            for parameter in head.parameters(recurse=False):
                parameter.mul_(settings.head_init_scale)
        if settings.head_init_bias is not None:
            if not isinstance(getattr(head, "bias", None), Tensor):
                raise UserError(f"model.head-init-bias: the last layer, {name}, has no bias; leave it out.")
            nn.init.constant_(head.bias, settings.head_init_bias)  # type: ignore[arg-type]


LEAST = 0.9
"""The part of the body's numbers that must be in the file. With less, the run would begin nearly at random."""
# Functions in the modules of timm's models that turn other programs' names and sizes into those of a model.
FILTERS = ("checkpoint_filter_fn", "_filter_fn", "_filter_torchvision_pretrained")


def load_into(
    model: nn.Module, weights: Weights, classes: Sequence[str], channels: int, *, remaps: bool = False
) -> str:
    """Load `weights` into `model`, which has `classes` and takes `channels`. Returns a line that says what was done.

    The body is loaded, and adapted to the image size and to the channels as timm does. The last layer is loaded if it
    is of the same classes, by name, in whatever order; if the file does not name its classes, as many are enough, as
    for published weights. `remaps`: of other classes, the rows of those that both have are loaded. Raises UserError if
    the file cannot be read, or is of another model.
    """
    from accel_train.models.weights.head import with_head

    given = read_state(weights.file)
    target = model.state_dict()
    state = _resized(model, given, target)
    _adapt_channels(model, state, channels)
    both = [name for name in state if name in given and name in target]
    adapted = [name for name in both if given[name].shape != state[name].shape]
    head = [name for name in target if name.startswith(tuple(f"{layer}." for layer in classifier_names(model)))]
    state, head_text = with_head(
        state, {name: target[name] for name in head}, weights.classes, classes, weights.shown, remaps=remaps
    )

    loaded = {name: value for name, value in state.items() if name in target and _fits(value, target[name])}
    body = [name for name, value in target.items() if name not in head and value.is_floating_point()]
    _check_enough(model, weights, given, loaded, body)
    model.load_state_dict(target | loaded)
    new = [name for name in body if name not in loaded]
    left_out = [name for name in state if name not in loaded and name not in head]
    parts = [
        f"body loaded, {sum(name in loaded for name in body)} of {len(body)} tensors",
        f"adapted to this size or these channels: {first_of(adapted)}" if adapted else "",
        head_text,
        f"new: {first_of(new)}" if new else "",
        f"left out: {first_of(left_out)}" if left_out else "",
    ]
    return f"{weights.shown}: {'; '.join(filter(None, parts))}"


def _resized(model: nn.Module, state: dict[str, Tensor], target: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state with the model's names, and with its position embeddings for the model's image size."""
    import torchvision

    state = dict(state)
    module = type(model).__module__
    try:
        if module.startswith("timm.models."):
            known = vars(sys.modules[module])
            function: Any = next((known[name] for name in FILTERS if name in known), None)
            if function is not None:
                return dict(_call_filter(function, state, model))
        elif isinstance(model, torchvision.models.VisionTransformer):
            name = "encoder.pos_embedding"
            if name in state and state[name].shape != target[name].shape:
                resize = torchvision.models.vision_transformer.interpolate_embeddings
                return dict(resize(model.image_size, model.patch_size, state))
    except (LookupError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError):
        pass  # of another model: the comparison that follows says so
    return state


def _call_filter(function: Any, state: dict[str, Tensor], model: nn.Module) -> Any:
    try:
        return function(state, model)
    except TypeError:  # some take no model
        return function(state)


def _adapt_channels(model: nn.Module, state: dict[str, Tensor], channels: int) -> None:
    """Adapt the first layer's weights in `state`, in place, to images of `channels`."""
    target = model.state_dict()
    for name in (f"{layer}.weight" for layer in input_names(model)):
        if name not in state or name not in target:
            continue
        value, wanted = state[name], target[name]
        if value.ndim != 4 or wanted.ndim != 4 or value.shape[1] == wanted.shape[1]:
            continue
        before = value.shape[1] * channels // wanted.shape[1]  # the channels of the file: stems may divide by space
        if before < 1:
            continue
        more = {} if before == 3 else {"base_chans": before}  # older versions of timm know only 3
        try:
            state[name] = timm.models.adapt_input_conv(channels, value, **more)
        except (NotImplementedError, TypeError, AssertionError):
            continue


def _fits(value: Tensor, target: Tensor) -> bool:
    return value.shape == target.shape and value.is_floating_point() == target.is_floating_point()


def _check_enough(
    model: nn.Module, weights: Weights, given: dict[str, Tensor], loaded: dict[str, Tensor], body: Iterable[str]
) -> None:
    """Raise UserError unless `loaded` has nearly all numbers of the body."""
    sizes = {name: value.numel() for name, value in model.state_dict().items() if name in set(body)}
    part = sum(size for name, size in sizes.items() if name in loaded) / max(1, sum(sizes.values()))
    if part >= LEAST:
        return
    own = model.state_dict()
    unfit = next((name for name in own if name in given and name in sizes and name not in loaded), None)
    example = ""
    if unfit is not None:
        example = f" {unfit} is {tuple(given[unfit].shape)} there and {tuple(own[unfit].shape)} here."
    raise UserError(
        f"--model.weights: {weights.shown} is of another model: it has only {part:.0%} of this model's parameters. Its "
        f"first tensors are {_few(given)}; this model's are {_few(own)}.{example} Give the model.name and "
        "the model.image-size of these weights."
    )


def _few(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:3])


SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".tar", ".ckpt")

TAR_MAGIC = slice(257, 262)


@dataclass(frozen=True)
class Weights:
    """The weights that a new run begins from."""

    file: Path
    shown: str
    """How messages name them."""
    classes: tuple[str, ...] | None
    """Names of the classes, in the order of the last layer's rows; None if nobody knows."""


def read_state(file: Path) -> dict[str, Tensor]:
    """The tensors in a file of weights, by name.

    A .pth file may also be a checkpoint of timm's or torchvision's scripts, with the weights (if it has an EMA, those)
    in one of its entries, and their names may begin with "module.". Raises UserError.
    """
    check_file(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about files that it then refuses
            state = timm.models.load_state_dict(str(file), weights_only=True)
        tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    except Exception as error:  # a damaged or hostile file may make its reader raise anything
        raise UserError(f"--model.weights: {file} cannot be read: {_reason(file, error)}.") from error
    if not tensors:
        raise UserError(f"--model.weights: {file} has no weights: it contains {one_line([*state], 80)}.")
    return tensors


def check_file(file: Path) -> None:
    """Raise UserError unless a file is regular, and begins as a file of its kind does: before anything reads it whole,
    which of a huge one full of zeros would take for ever."""
    if file.suffix not in SUFFIXES:
        raise UserError(f"--model.weights: {file}: expected a file of weights ({', '.join(SUFFIXES[:4])}).")
    try:
        with os.fdopen(open_regular_file(file, follow=True), "rb") as opened:
            head, size = opened.read(TAR_MAGIC.stop), os.fstat(opened.fileno()).st_size
    except OSError as error:
        raise UserError(f"--model.weights: {file} cannot be read: {error.strerror}.") from error
    if file.suffix == ".safetensors":
        fits = 0 < int.from_bytes(head[:8], "little") <= size - 8
    else:  # of torch.save: a zip file, a pickle, or an old tar file
        fits = head[:2] == b"PK" or head[:1] == b"\x80" or head[TAR_MAGIC] == b"ustar"
    if not fits:
        raise UserError(f"--model.weights: {file} cannot be read: it is damaged, or not what its name says.")


def _reason(file: Path, error: Exception) -> str:
    text = reason_of(error, 200)
    if "weights_only" in text:
        found = torch.serialization.get_unsafe_globals_in_checkpoint
        try:
            names = ", ".join(found(str(file)))
        except Exception:
            names = ""
        if names:
            return f"loading it would run code ({one_line(names, 100)}); save its state_dict alone, as safetensors"
        return "it is not a file of torch.save"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"it is damaged, or not what its name says ({text})"
