"""The weights that a new run begins from: of a file, of a run or of one of its checkpoints.

A file may come from anywhere: it is read without running any code that may be in it. The model may have other classes,
another number of channels or another image size.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.errors import UserError, first_of, one_line, reason_of
from accel_train.files import open_regular_file
from accel_train.models.classifier import classifier_names, required_classifier
from accel_train.models.wrapping import input_names

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".tar", ".ckpt")
LEAST = 0.9
"""The part of the body's numbers that must be in the file. With less, the run would begin nearly at random."""
# Functions in the modules of timm's models that turn other programs' names and sizes into those of a model.
FILTERS = ("checkpoint_filter_fn", "_filter_fn", "_filter_torchvision_pretrained")


@dataclass(frozen=True)
class Weights:
    """The weights that a new run begins from."""

    file: Path
    shown: str
    """How messages name them."""
    classes: tuple[str, ...] | None
    """Names of the classes, in the order of the last layer's rows; None if nobody knows."""


def load_into(model: nn.Module, weights: Weights, classes: Sequence[str], channels: int) -> str:
    """Load `weights` into `model`, which has `classes` and takes `channels`. Returns a line that says what was done.

    The body is loaded, and adapted to the image size and to the channels as timm does. The last layer is loaded if it
    is of the same classes, by name, in whatever order; if the file does not name its classes, as many are enough, as
    for published weights. Raises UserError if the file cannot be read, or is of another model.
    """
    return load_state(model, read_state(weights.file), weights, classes, channels)


def load_state(
    model: nn.Module, given: dict[str, Tensor], weights: Weights, classes: Sequence[str], channels: int
) -> str:
    """As `load_into`, with the tensors that the file has."""
    target = model.state_dict()
    state = _resized(model, given, target)
    _adapt_channels(model, state, target, channels)
    both = [name for name in state if name in given and name in target]
    adapted = [name for name in both if given[name].shape != state[name].shape]
    head = [name for name in target if name.startswith(tuple(f"{layer}." for layer in classifier_names(model)))]
    if not head:
        _check_same_head(model, weights, classes, state, target)
    state, head_text = _with_head(state, {name: target[name] for name in head}, weights, classes)

    loaded = {name: value for name, value in state.items() if name in target and _fits(value, target[name])}
    body = [name for name, value in target.items() if name not in head and value.is_floating_point()]
    _check_enough(weights, given, loaded, target, body)
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


def _adapt_channels(model: nn.Module, state: dict[str, Tensor], target: dict[str, Tensor], channels: int) -> None:
    """Adapt the first layer's weights in `state`, in place, to images of `channels`. `target`: the model's state."""
    from timm.models import adapt_input_conv

    for name in (f"{layer}.weight" for layer in input_names(model)):
        if name not in state or name not in target:
            continue
        value, wanted = state[name], target[name]
        if value.ndim == wanted.ndim == 4 and value.shape[1] != wanted.shape[1]:
            with suppress(NotImplementedError, AssertionError):  # not of colour images: the layer will be new
                state[name] = adapt_input_conv(channels, value)


def _fits(value: Tensor, target: Tensor) -> bool:
    return value.shape == target.shape and value.is_floating_point() == target.is_floating_point()


def _with_head(
    state: dict[str, Tensor], head: dict[str, Tensor], weights: Weights, classes: Sequence[str]
) -> tuple[dict[str, Tensor], str]:
    """The state with the rows of the last layer in the order of `classes`, or without it; and words for that.

    `head`: the new last layer.
    """
    theirs = weights.classes
    rows = list(range(len(classes)))
    rest = {name: value for name, value in state.items() if name not in head}
    found = {name: state[name] for name in head if name in state}
    if not head:  # it is not known which one it is, and all weights fit
        return rest, "last layer loaded with the body"
    if len(found) < len(head):
        return rest, "new last layer: the file has none"
    count = next(iter(found.values())).shape[0] if found else 0
    if count != len(classes):
        return rest, f"new last layer: {count} classes there, {len(classes)} here"
    if theirs is not None and len(theirs) == count:
        if missing := [name for name in classes if name not in theirs]:
            return rest, f"new last layer: other classes ({missing[0]!r} is not there)"
        rows = [theirs.index(name) for name in classes]
        text = "last layer loaded: the same classes" + ", in another order" * (list(theirs) != list(classes))
    else:
        text = f"last layer loaded: as many classes ({count}), which the file does not name"
    if any(value.shape != head[name].shape for name, value in found.items()):
        return rest, "new last layer: that of the file has another shape"
    return rest | {name: value[rows] for name, value in found.items()}, text


def _check_same_head(
    model: nn.Module, weights: Weights, classes: Sequence[str], state: dict[str, Tensor], target: dict[str, Tensor]
) -> None:
    """Of a model whose last layer is not known: raise UserError unless all weights can be loaded as they are."""
    same = weights.classes is None or list(weights.classes) == list(classes)
    if not same or any(name in state and not _fits(state[name], value) for name, value in target.items()):
        required_classifier(model, f"--model.weights: {weights.shown} is of other classes: a new last layer")


def _check_enough(
    weights: Weights,
    given: dict[str, Tensor],
    loaded: dict[str, Tensor],
    own: dict[str, Tensor],
    body: Sequence[str],
) -> None:
    """Raise UserError unless `loaded` has nearly all numbers of the `body`, names of the model's `own` state."""
    sizes = {name: own[name].numel() for name in body}
    part = sum(size for name, size in sizes.items() if name in loaded) / max(1, sum(sizes.values()))
    if part >= LEAST:
        return
    unfit = next((name for name in body if name in given and name not in loaded), None)
    example = ""
    if unfit is not None:
        example = f" {unfit} is {tuple(given[unfit].shape)} there and {tuple(own[unfit].shape)} here."
    raise UserError(
        f"--model.weights: {weights.shown} is of another model: it has only {part:.0%} of this model's parameters. Its "
        f"first tensors are {first_of([*given])}; this model's are {first_of([*own])}.{example} Give the model.name "
        "and the model.image-size of these weights."
    )


def read_state(file: Path) -> dict[str, Tensor]:
    """The tensors in a file of weights, by name.

    A .pth file may also be a checkpoint of timm's or torchvision's scripts, with the weights (if it has an EMA, those)
    in one of its entries, and their names may begin with "module.". Raises UserError.
    """
    from timm.models import load_state_dict

    check_file(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about files that it then refuses
            state = load_state_dict(str(file), weights_only=True)
        tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
        odd = next((name for name, value in tensors.items() if value.is_meta or value.layout != torch.strided), None)
        if odd is not None:
            raise ValueError(f"{odd} is a tensor without its values, or a sparse one")
    except Exception as error:  # a damaged or hostile file may make its reader raise anything
        reason = reason_of(error, 200)
        if "weights_only" in reason:
            reason = "it is damaged, or has more than tensors, which could run code; save its state_dict as safetensors"
        raise UserError(f"--model.weights: {file} cannot be read: {reason}.") from error
    if not tensors:
        raise UserError(f"--model.weights: {file} has no weights: it contains {one_line([*state], 80)}.")
    return tensors


def check_file(file: Path) -> None:
    """Raise UserError unless a file is regular, and begins as a file of its kind does: before anything reads it whole,
    which of a huge one full of zeros would take for ever."""
    if file.suffix not in SUFFIXES or not file.is_file():
        raise UserError(f"--model.weights: {file}: expected a file of weights ({', '.join(SUFFIXES[:4])}).")
    try:
        with os.fdopen(open_regular_file(file, follow=True), "rb") as opened:
            head, size = opened.read(8), os.fstat(opened.fileno()).st_size
    except OSError as error:
        raise UserError(f"--model.weights: {file} cannot be read: {error.strerror}.") from error
    if file.suffix == ".safetensors":
        fits = 0 < int.from_bytes(head, "little") <= size - 8
    else:  # of torch.save: a zip file, or a pickle
        fits = head.startswith((b"PK", b"\x80"))
    if not fits:
        raise UserError(f"--model.weights: {file} cannot be read: it is damaged, or not what its name says.")
