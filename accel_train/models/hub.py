"""Models named hf-hub:ORG/NAME and local-dir:DIR, as timm names and writes them: a config.json beside the weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from accel_train.errors import UserError, one_line

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

PUBLISHED_ARGUMENTS: dict[str, dict[str, Any]] = {"fbnetc_100": {"bn_eps": 1e-3}}
"""Arguments that timm gives a model only together with its published weights. Here the model always has them, because
later runs begin from these weights, too."""


@dataclass(frozen=True)
class Weights:
    """The weights that a new run begins from."""

    file: Path
    shown: str
    """How messages name them."""
    classes: tuple[str, ...] | None
    """Names of the classes, in the order of the last layer's rows; None if nobody knows."""


@dataclass(frozen=True)
class Description:
    """What a config.json says."""

    architecture: str
    """See `Origin.architecture`."""
    image_size: int
    fixed_size: bool
    """Whether the model takes images of one size only, unless it is created for another one."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...] | None
    """Names of the classes, in the order of the logits; None if it does not say."""


def is_hub_name(name: str) -> bool:
    """Whether `name` is one of hf-hub:, hf_hub: or local-dir:, rather than that of a library's model."""
    return name.startswith(PREFIXES)


def describe(name: str) -> Description:
    """Read the config.json of `name`: from its directory, the hub, or the hub's cache. Raises UserError."""
    path = _find(name, (CONFIG,))
    from timm.models import PretrainedCfg
    from timm.models._hub import load_model_config_from_path

    try:
        saved, architecture, arguments = load_model_config_from_path(path.parent)
        names = saved.get("label_names")
        kept = {key: saved[key] for key in KEPT if key in saved}
        config = PretrainedCfg(**kept)
        text = json.dumps({"name": architecture, "arguments": arguments, "config": kept}, sort_keys=True)
        description = Description(
            text,
            int(config.input_size[-1]),
            bool(config.fixed_input_size),
            tuple(map(float, config.mean)),
            tuple(map(float, config.std)),
            _class_names(names),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"model.name: {path} is not a configuration of a timm model ({one_line(error)}).") from error
    architecture_of(name, text)
    return description


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


def create(
    name: str, text: str, num_classes: int, channels: int, image_size: int, options: dict[str, Any]
) -> nn.Module:
    """The model that `text` (see `Origin.architecture`) describes, with random weights."""
    import timm
    from timm.models import PretrainedCfg

    architecture, arguments, config = architecture_of(name, text)
    published = PretrainedCfg(**config)
    arguments = PUBLISHED_ARGUMENTS.get(architecture, {}) | arguments
    if published.fixed_input_size or "img_size" in arguments:
        options = {"img_size": image_size} | options
    made: nn.Module = timm.create_model(
        architecture,
        pretrained=False,
        pretrained_cfg=config | {"architecture": architecture},
        **(arguments | {"num_classes": num_classes, "in_chans": channels} | options),
    )
    return made


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
