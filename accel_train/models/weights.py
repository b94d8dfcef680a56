"""The weights that a new run begins from: of a file, or of a model of timm's on the hub or in a directory, named
hf-hub:ORG/NAME and local-dir:DIR as timm names and writes them: a config.json beside the weights.

A file may come from anywhere: it is read without running any code that may be in it. The model may have other classes,
another number of channels or another image size.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.config.schema import Origin
from accel_train.errors import UserError, first_of, one_line, reason_of
from accel_train.models.classifier import classifier_names, required_classifier
from accel_train.models.wrapping import input_names
from accel_train.untrusted import open_regular_file

PREFIXES = ("hf-hub:", "hf_hub:", "local-dir:")
CONFIG = "config.json"
# In the order in which timm looks for them.
FILES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth", "open_clip_model.safetensors")
# Entries of timm's model configuration that determine the model's shape and input. Others name files and addresses.
KEPT = (
    "input_size", "fixed_input_size", "pool_size", "first_conv", "classifier", "num_classes", "mean", "std",
    "interpolation", "crop_pct",
)  # fmt: skip
# Arguments of timm.create_model itself: config.json has those of the model.
RESERVED = {
    "model_name", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_model_args", "checkpoint_path",
    "cache_dir", "features_only",
}  # fmt: skip
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".tar", ".ckpt")
TAR_MAGIC = slice(257, 262)
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


def is_hub_name(name: str) -> bool:
    """Whether `name` is one of hf-hub:, hf_hub: or local-dir:, rather than that of a library's model."""
    return name.startswith(PREFIXES)


def describe(name: str, pretrained: bool) -> tuple[Origin, tuple[str, ...] | None]:
    """What the config.json of `name` says of the model, and the names of its classes in the order of the logits, None
    if it does not say them. Raises UserError.

    It is read from the model's directory, the hub, or the hub's cache. `pretrained`: the size and the normalisation of
    the images are those of the weights; otherwise only a size that the model cannot do without.
    """
    path = _find(name, (CONFIG,))
    from timm.models import PretrainedCfg
    from timm.models._hub import load_model_config_from_path

    try:
        saved, architecture, arguments = load_model_config_from_path(path.parent)
        kept = {key: saved[key] for key in KEPT if key in saved}
        config = PretrainedCfg(**kept)
        text = json.dumps({"name": architecture, "arguments": arguments, "config": kept}, sort_keys=True)
        origin = Origin(model=name, architecture=text)
        if pretrained or config.fixed_input_size:
            origin = replace(origin, image_size=int(config.input_size[-1]))
        if pretrained:
            origin = replace(origin, mean=tuple(map(float, config.mean)), std=tuple(map(float, config.std)))
        classes = _class_names(saved.get("label_names"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"model.name: {path} is not a configuration of a timm model ({one_line(error)}).") from error
    architecture_of(name, text)
    return origin, classes


def _class_names(names: Any) -> tuple[str, ...] | None:
    if isinstance(names, dict):  # by index
        names = [names[index] for index in sorted(names, key=int)]
    return tuple(map(str, names)) if names else None


def weights_file(name: str) -> Path:
    """The file of the weights of `name`, from its directory, the hub, or the hub's cache. Raises UserError."""
    return _find(name, FILES)


def architecture_of(name: str, text: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """timm's name of the architecture, its arguments and its configuration, from `Origin.architecture` of `name`.

    The run may be somebody else's: nothing in the result makes timm read a file or fetch. Raises UserError.
    """
    import timm

    described = json.loads(text)
    architecture, arguments = described["name"], described["arguments"]
    if not isinstance(architecture, str) or not timm.is_model(architecture):
        raise UserError(f"model.name: {name} is of the architecture {architecture!r}, which this timm does not have.")
    if unusable := RESERVED & arguments.keys():
        raise UserError(f"model.name: {name} has model_args that cannot be used: {', '.join(sorted(unusable))}.")
    config = {key: value for key, value in described["config"].items() if key in KEPT}
    return architecture, arguments, config


def _find(name: str, files: Sequence[str]) -> Path:
    """The first of `files` that the model `name` has. Raises UserError."""
    import timm

    try:
        source, place = timm.models.parse_model_name(name)
    except ValueError as error:
        raise UserError(f"model.name: {name}: {one_line(error)}") from error
    if source == "hf-hub":
        repository, _, revision = place.partition("@")
        return fetch(repository, files, revision or None)
    folder = Path(place)
    found = [folder / file for file in files if (folder / file).is_file()]
    if not found:
        raise UserError(
            f"model.name: {name}: {folder} has no {' or '.join(files[:2])}. Give a directory as "
            "timm.models.save_for_hf writes it; for a file of weights alone, give --model.weights FILE."
        )
    return found[0]


def fetch(repository: str, files: Sequence[str], revision: str | None = None) -> Path:
    """Download the first of `files` that a repository of the hub has, unless the cache has it; return its path.

    With HF_HUB_OFFLINE=1, or without a network, it must be in the cache: there is no second attempt. Raises UserError.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

    offline: Exception | None = None
    for file in files:
        try:
            if offline is None:
                try:  # hf_hub_download itself would repeat this request five times before it gives up
                    get_hf_file_metadata(hf_hub_url(repository, file, revision=revision), timeout=10)
                except RemoteEntryNotFoundError:
                    continue
                except Exception as error:  # of the HTTP library: a proxy, a time-out, a refused connection, a status
                    offline = error
            found = hf_hub_download(repository, file, revision=revision, local_files_only=offline is not None)
            return Path(found)
        except LocalEntryNotFoundError:
            continue
        except Exception as error:
            raise _not_fetched(repository, revision, error) from error
    if offline is None:
        raise UserError(f"{repository} on the hub has no {' or '.join(files[:2])}: it is not a model of timm's.")
    raise _not_fetched(repository, revision, offline) from offline


def _not_fetched(repository: str, revision: str | None, error: Exception) -> UserError:
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, HFValidationError):
        return UserError(f"model.name: {one_line(error, 200)} A model of the hub is named hf-hub:ORG/NAME.")
    if isinstance(error, (RepositoryNotFoundError, RevisionNotFoundError)):
        at = f" at revision {revision}" if revision else ""
        return UserError(
            f"The hub has no model {repository}{at}, or you may not read it; for a private one: hf auth login"
        )
    command = download_command(repository, revision)
    reason = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
    return UserError(
        f"The weights of {repository} could not be fetched ({reason.rstrip('.')}), and the cache of the hub "
        "does not have them. Run this once "
        f"where there is a network, with the same HF_HOME, such as on the login node: {command}"
    )


def download_command(repository: str, revision: str | None = None) -> str:
    """The command that puts a repository of the hub into the cache."""
    return f"hf download {repository}" + (f" --revision {revision}" if revision else "")


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
        if value.ndim != 4 or wanted.ndim != 4 or value.shape[1] == wanted.shape[1]:
            continue
        before = value.shape[1] * channels // wanted.shape[1]  # the channels of the file: stems may divide by space
        if before < 1:
            continue
        more = {} if before == 3 else {"base_chans": before}  # older versions of timm know only 3
        try:
            state[name] = adapt_input_conv(channels, value, **more)
        except (NotImplementedError, TypeError, AssertionError):
            continue


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
    if theirs is not None and len(theirs) == count:
        if sorted(theirs) != sorted(classes) or len(set(theirs)) < len(theirs):
            return rest, f"new last layer: {_difference(theirs, classes)}"
        rows = [theirs.index(name) for name in classes]
        text = "last layer loaded: the same classes" + ", in another order" * (list(theirs) != list(classes))
    elif count != len(classes):
        return rest, f"new last layer: {count} classes there, {len(classes)} here"
    else:
        text = f"last layer loaded: as many classes ({count}), which the file does not name"
    if any(value.shape != head[name].shape for name, value in found.items()):
        return rest, "new last layer: that of the file has another shape"
    return rest | {name: value[rows] for name, value in found.items()}, text


def _difference(theirs: Sequence[str], ours: Sequence[str]) -> str:
    if len(theirs) != len(ours):
        return f"{len(theirs)} classes there, {len(ours)} here"
    return f"other classes ({next(name for name in theirs if name not in ours)!r} is not here)"


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
        raise UserError(f"--model.weights: {file} cannot be read: {_reason(error)}.") from error
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


def _reason(error: Exception) -> str:
    text = reason_of(error, 200)
    if "weights_only" in text:
        return "it has more than tensors, and loading that could run code; save its state_dict alone, as safetensors"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"it is damaged, or not what its name says ({text})"
