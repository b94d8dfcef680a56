"""The format timm: a directory that timm.create_model("local-dir:DIR", pretrained=True) loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from accel_train.analysis.loaded_run import LoadedRun
from accel_train.config.schema import Model
from accel_train.data.transforms.parameters import crop_fraction
from accel_train.errors import UserError
from accel_train.export.formats import Loaded, quietly
from accel_train.models.factory import more_arguments
from accel_train.models.nets import NETS, TORCHVISION
from accel_train.models.torchvision_models import architecture, is_torchvisions
from accel_train.models.weights.hub import CONFIG, FILES, KEPT, architecture_of, is_hub_name
from accel_train.records.model_info import ModelInfo
from accel_train.user_code.reference import parse_reference, short_name

# Models of others that are one of timm's, with the same names of weights: its name there, and its arguments.
SAME: dict[str, tuple[str, dict[str, Any]]] = {
    f"{TORCHVISION}{name}": (name, {})
    for name in (
        "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnext50_32x4d", "resnext101_32x8d",
        "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2",
    )
} | {
    "vit_s16_plain": ("vit_small_patch16_224", {"class_token": False, "global_pool": "avg", "fc_norm": False})
}  # fmt: skip


def timm_architecture(model: Model, info: ModelInfo) -> tuple[str, dict[str, Any]]:
    """timm's name of the run's architecture, and the arguments that it is created with.

    Raises UserError if timm has no such architecture.
    """
    arguments = more_arguments(model)
    if is_hub_name(model.name):
        name, described, _ = architecture_of(model.name, info.origin.architecture)
        reserved = ("num_classes", "in_chans", "img_size")
        return name, {key: value for key, value in described.items() if key not in reserved} | arguments
    theirs = model.name.startswith(TORCHVISION)
    if (same := TORCHVISION + architecture(model.name) if theirs else model.name) in SAME:
        if arguments and theirs:
            raise _not_timms(model, ", with model.kwargs")
        name, own = SAME[same]
        return name, own | arguments
    of_others = model.name in NETS or is_torchvisions(model.name)
    if of_others or parse_reference("model.name", model.name) is not None:
        raise _not_timms(model)
    return model.name.partition(".")[0], arguments


def _not_timms(model: Model, more: str = "") -> UserError:
    name = short_name("model.name", model.name)
    return UserError(f"--format timm: {name}{more} is not an architecture of timm's; use --format onnx or pt2.")


def write_timm(run: LoadedRun, rules: dict[str, Any], folder: Path) -> None:
    """Write config.json and model.safetensors."""
    import timm

    settings, info = run.config.model, run.info
    name, arguments = timm_architecture(settings, info)
    if is_hub_name(settings.name):
        published = architecture_of(settings.name, info.origin.architecture)[2]
    else:
        published = timm.models.get_pretrained_cfg(name).to_dict()
    size, last = info.image_size, (rules["steps"] or [{"resize": info.image_size}])[-1]
    config = {key: published[key] for key in KEPT if published.get(key) is not None} | {
        "input_size": [info.channels, size, size],
        "mean": list(info.mean),
        "std": list(info.std),
        "interpolation": rules["interpolation"],
        "crop_pct": crop_fraction(size, last["resize"]),
        "crop_mode": "center",
    }
    config.pop("num_classes", None)
    if tuple(published.get("input_size", ())[1:]) != (size, size):
        config.pop("pool_size", None)
    if published.get("fixed_input_size") or name == "vit_small_patch16_224":
        arguments["img_size"] = info.training_size
    if info.channels != 3:
        arguments["in_chans"] = info.channels
        config.pop("first_conv", None)  # else timm would adapt the first layer from three channels once more
    description = {
        "architecture": name,
        "num_classes": len(info.classes),
        "label_names": list(info.classes),
        "model_args": arguments,
        "pretrained_cfg": config,
    }
    (folder / CONFIG).write_text(json.dumps(description, indent=2) + "\n")
    tensors = {
        key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in run.model.state_dict().items()
    }
    save_file(tensors, folder / FILES[0])


def load_timm(folder: Path) -> Loaded:
    import timm

    with quietly("timm"):
        model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    return model
