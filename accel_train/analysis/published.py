"""`accel-train evaluate --model.name NAME --model.pretrained true …`: a published model, without a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train import models
from accel_train.analysis.measure import EvaluationResult, Subject, measure
from accel_train.config.declaration import Tta
from accel_train.config.options import parse_settings
from accel_train.config.origin import Origin
from accel_train.config.schema import Config, Model
from accel_train.data.sources.load import load_splits
from accel_train.data.transforms.parameters import crop_fraction
from accel_train.errors import LOGGER, UserError, first_of, nearest
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.agreement import broadcast_from_main
from accel_train.launch.environment import Launch
from accel_train.models.nets import NETS, TORCHVISION
from accel_train.models.torchvision_models import published_normalization, published_weights
from accel_train.models.weights import hub
from accel_train.models.weights.file import read_state
from accel_train.user_code.reference import parse_reference


@dataclass(frozen=True)
class Published:
    """What is known of a published model and of the images that it was trained with."""

    classes: tuple[frozenset[str], ...]
    """The names of each class, in the order of the logits: for ImageNet the WordNet ID and all synonyms."""
    shown: tuple[str, ...]
    """One name of each class."""
    image_size: int
    crop_fraction: float
    """The part of the image's short side that the crop has."""
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    origin: Origin


def evaluate_published(
    launch: Launch, overrides: Sequence[str], *, split: str, keep_predictions: bool, tta: Tta = "none"
) -> EvaluationResult:
    """Evaluate the published model that `overrides` name (--model.KEY, --data.KEY, --augment.KEY) on a split.

    Its images are prepared as its publisher evaluates it, unless --augment.crop-fraction, --augment.resize,
    --augment.mean, --augment.std or --model.image-size says otherwise. `keep_predictions`: return the logits. `tta`:
    see analysis/inference/tta.py. Collective. Raises UserError, also if a class of the data is none of the model's.
    """
    config = parse_settings({}, overrides)
    accelerator = create_accelerator(launch)
    published = broadcast_from_main(accelerator, lambda: describe(config.model))
    splits = load_splits(config.data, config.seed)
    if splits.multi_label:
        raise UserError("the images of this data may have several labels; a published model has one label an image.")
    columns = match_classes(splits.classes, published.classes, published.shown, config.model.name)
    config, size = _prepared(config, published)
    network = _network(config, published, accelerator, splits.channels, size)
    known, wanted = len(published.classes), len(columns)
    if accelerator.is_main_process:
        rest = "" if wanted == known else f"; the logits of the other {known - wanted:,} are left out"
        LOGGER.info(f"The data's {wanted:,} classes are all among the model's {known:,}, by name{rest}.")
    models_of = {"model": _Columns(network, columns)}
    names = {"model": config.model.name}
    about = {"weights": config.model.name}
    subject = Subject(config, splits, split, size, models_of, names, "published weights", about, tta=tta)
    return measure(subject, accelerator, keep_predictions=keep_predictions)


class _Columns(nn.Module):
    """A model whose logits are those of some of the classes, in another order."""

    def __init__(self, model: nn.Module, columns: Sequence[int]) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("columns", torch.tensor(columns), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images)
        return logits.index_select(1, self.get_buffer("columns"))


def describe(model: Model) -> Published:
    """What the library or the hub says of the model. Raises UserError if there are no published weights or no names."""
    name = model.name
    if name in NETS or parse_reference("model.name", name) is not None:
        raise UserError(f"--model.name {name}: has no published weights; name a model of timm's, torchvision/NAME or "
                        "hf-hub:ORG/NAME, or evaluate a run.")  # fmt: skip
    if model.weights is not None:
        raise UserError("--model.weights: evaluate takes published weights (--model.pretrained true) or a run.")
    if not model.pretrained and not hub.is_hub_name(name):
        raise UserError(f"--model.name {name}: without a run, only published weights can be evaluated; add "
                        "--model.pretrained true.")  # fmt: skip
    models.input_size(model, None)  # raises for an unknown name
    if name.startswith(TORCHVISION):
        return _of_torchvision(name)
    return _of_timm(name)


def _of_torchvision(name: str) -> Published:
    weights = published_weights(name)
    transforms, categories = weights.transforms(), weights.meta["categories"]
    return Published(
        tuple(frozenset({_plain(category)}) for category in categories),
        tuple(categories),
        int(transforms.crop_size[0]),
        crop_fraction(int(transforms.crop_size[0]), int(transforms.resize_size[0])),
        transforms.interpolation.value,
        *published_normalization(name),
        Origin(),
    )


def _of_timm(name: str) -> Published:
    from timm.data import ImageNetInfo, infer_imagenet_subset, resolve_data_config
    from timm.models import get_pretrained_cfg

    origin, own_names = Origin(), None
    if hub.is_hub_name(name):
        described = hub.describe(name)
        origin = Origin(model=name, architecture=described.architecture)
        own_names, config = described.classes, hub.architecture_of(name, described.architecture)[2]
    else:
        config = get_pretrained_cfg(name).to_dict()
    # The size of evaluation, which may be larger than that of training, as in timm's validate.py.
    found = resolve_data_config({}, pretrained_cfg=config, use_test_size=True)
    subset = infer_imagenet_subset(config)
    of_wordnet = own_names is None or all(name[:1] == "n" and name[1:].isdigit() for name in own_names)
    if subset is not None and of_wordnet:
        info = ImageNetInfo(subset)
        own_names = tuple(info.label_names())
        classes = tuple(
            frozenset({_plain(label), *map(_plain, info.index_to_description(number).split(", "))})
            for number, label in enumerate(own_names)
        )
    elif own_names is not None:
        classes = tuple(frozenset({_plain(label)}) for label in own_names)
    else:
        raise UserError(f"--model.name {name}: its publisher gives no class names to compare with the data's.")
    return Published(
        classes,
        own_names,
        int(found["input_size"][-1]),
        float(found["crop_pct"]),
        found["interpolation"],
        tuple(found["mean"]),
        tuple(found["std"]),
        origin,
    )


def _plain(name: str) -> str:
    """A class name without what people write differently: "Golden_Retriever" is "golden retriever"."""
    return " ".join(name.replace("_", " ").replace("-", " ").lower().split())


def match_classes(data: Sequence[str], model: Sequence[frozenset[str]], shown: Sequence[str], name: str) -> list[int]:
    """The number of each of the data's classes among the model's, by name. Raises UserError unless all are there."""
    found: dict[str, list[int]] = {}
    for number, names in enumerate(model):
        for each in names:
            found.setdefault(each, []).append(number)
    numbers = [found.get(_plain(label), []) for label in data]
    missing = [label for label, matches in zip(data, numbers, strict=True) if not matches]
    if missing:
        listed, hint = first_of([*map(repr, missing)], 5), nearest(_plain(missing[0]), found)
        raise UserError(
            f"{len(missing)} of the data's {len(data)} classes are none of the {len(model):,} of {name}, such as "
            f"{shown[0]!r}: {listed}.{hint} Give the folders the model's names (for ImageNet, WordNet IDs such as "
            "n01440764), or fine-tune the model."
        )
    double = next((label for label, matches in zip(data, numbers, strict=True) if len(matches) > 1), None)
    if double is not None:
        named = " and ".join(shown[number] for number in found[_plain(double)])
        raise UserError(f"class {double!r} of the data may be {named} of {name}; give the folder one of these names.")
    columns = [matches[0] for matches in numbers]
    for label, column in zip(data, columns, strict=True):
        first = data[columns.index(column)]
        if first != label:
            raise UserError(f"classes {first!r} and {label!r} of the data are both {shown[column]!r} of {name}.")
    return columns


def _prepared(config: Config, published: Published) -> tuple[Config, int]:
    """The configuration with the publisher's way to prepare images, where the user says nothing, and the input's
    size."""
    augment, model = config.augment, config.model
    size = model.eval_image_size or model.image_size or published.image_size
    changes: dict[str, Any] = {
        "crop_fraction": augment.crop_fraction or (None if augment.resize else published.crop_fraction),
        "interpolation": published.interpolation if published.interpolation == "bicubic" else augment.interpolation,
        "mean": augment.mean or published.mean,
        "std": augment.std or published.std,
    }
    return dataclasses.replace(config, augment=dataclasses.replace(augment, **changes)), size


def _network(config: Config, published: Published, accelerator: Accelerator, channels: int, size: int) -> nn.Module:
    """The model with its published weights, in evaluation mode. One process downloads them."""
    with accelerator.main_process_first():
        made = models.create_model(
            config.model,
            num_classes=len(published.classes),
            channels=channels,
            image_size=size,
            published=True,
            origin=published.origin,
        )
        if hub.is_hub_name(config.model.name):
            file = hub.weights_file(config.model.name)
            try:
                made.load_state_dict(read_state(file))
            except RuntimeError as error:
                raise UserError(
                    f"{file} does not fit {config.model.name}: {str(error).splitlines()[-1].strip()}"
                ) from error
    return made.eval()
