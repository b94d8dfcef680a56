"""Datasets of a user's own function: `--data.name FILE.py:FUNCTION`.

The function returns a dict of map-style torch Datasets, "train" and any of "val" and "test", whose items are (image,
label); or a `Splits`, if it has a faster way to fetch batches. It is called with `root` (--data.root) if it takes that.

An item's image is a tensor, uint8 or float [C, H, W], of one size in the whole dataset; or a PIL image of any size,
which is resized and cropped like an image file. Floats are normalised with --augment.mean and --augment.std as they
are; the default is to leave them unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from accel_train.config.schema import Data
from accel_train.data.sources.arrays import ArraySource
from accel_train.data.sources.files.depth import few_bits_notes, largest_of_16_bits
from accel_train.data.sources.files.images import ImageError, default_mean_std
from accel_train.data.sources.splits import SPLIT_NAMES, Source, Splits, numbered, splits_of_files
from accel_train.data.sources.user.dataset import (
    EXPECTED,
    OPTION,
    UserDataset,
    as_pixels,
    kind_of,
    read_item,
    restored_generators,
    seed_generators,
)
from accel_train.data.sources.user.labels import labels_of, weights_of
from accel_train.errors import UserError, first_of, nearest
from accel_train.user_code.loading import call, load
from accel_train.user_code.reference import OBJECT, Reference


def user_data(data: Data, reference: Reference, record: Path | None) -> Splits:
    """The splits that the user's function returns. Collective if labels have to be read.

    `record`: folder in which the main process keeps labels that had to be read item by item. Raises UserError.
    """
    returned = call(OPTION, reference, load(OPTION, reference), {"root": data.root}, {})
    short = reference.short
    where, got = f"--{OPTION} {short}", "found" if reference.module == OBJECT else "returned"
    if isinstance(returned, Splits):
        return returned
    if not isinstance(returned, Mapping):
        raise UserError(f'{where}: {got} a value {kind_of(returned)}; expected a dict {{"train": Dataset, …}}.')
    datasets: dict[str, Any] = {}
    for name, dataset in returned.items():
        if name not in SPLIT_NAMES:
            hint = nearest(str(name), SPLIT_NAMES)
            raise UserError(f"{where}: {got} a split {str(name)!r}; expected train, val or test.{hint}")
        if dataset is not None:
            datasets[SPLIT_NAMES[name]] = _map_style(dataset, f"{where}: {name}")
    if "train" not in datasets:
        raise UserError(f"{where}: {got} no split 'train', only {', '.join(map(str, returned)) or 'none'}.")
    if all(type(dataset).__module__.startswith("datasets.") for dataset in datasets.values()):
        return _hugging_face(data, datasets, where)
    classes = _classes(datasets, where)
    train = datasets["train"]
    with restored_generators():
        seed_generators(0)
        image, _ = read_item(train, 0, reference, "train sample 0")
    try:
        pixels = as_pixels(image, data.channels, data.range)
    except ImageError as error:
        raise UserError(f"{where}: train sample 0 cannot be read: {error}.") from error
    if pixels is None:
        raise UserError(f"{where}: train sample 0 is {kind_of(image)}; {EXPECTED}.")
    shape = None if isinstance(image, Image.Image) else pixels.shape
    if shape is not None and shape[1] != shape[2]:
        raise UserError(
            f"{where}: the images are tensors of {shape[1]}x{shape[2]} pixels; expected squares. Crop or resize them "
            "in the Dataset, or return PIL images, which are resized and cropped."
        )
    labels = {split: labels_of(dataset, reference, split, record) for split, dataset in datasets.items()}
    classes = classes or numbered(where, labels.values())
    sources: dict[str, Source] = {
        split: _in_memory(dataset, f"{short} {split}", labels[split], pixels)
        or UserDataset(dataset, reference, split, labels[split], data.channels, shape, data.range, pixels.dtype)
        for split, dataset in datasets.items()
    }
    channels = pixels.shape[0]
    largest = largest_of_16_bits(image) if isinstance(image, Image.Image) else None
    is_float = pixels.is_floating_point()
    if is_float:
        mean, std = (0.0,) * channels, (1.0,) * channels
    else:
        mean, std = default_mean_std(channels) if channels in (1, 3) else ((0.5,) * channels, (0.25,) * channels)
    return splits_of_files(
        data,
        classes,
        sources,
        channels=channels,
        image_size=None if shape is None else shape[1],
        mean=mean,
        std=std,
        # Only then: a Dataset may call something else its weights.
        train_weights=weights_of(train, reference) if data.sampler == "weights" else None,
        notes=tuple(few_bits_notes([largest])) if data.range is None and largest is not None else (),
        full_scale=1 if is_float else 255,
        value_range=data.range if shape is None else None,
    )


def _in_memory(dataset: Any, label: str, labels: Tensor, like: Tensor) -> ArraySource | None:
    """A TensorDataset as a source that needs no workers; None if it is another Dataset.

    `like`: the first image of the training split.
    """
    if type(dataset) is not TensorDataset or dataset.tensors[0].shape[1:] != like.shape:
        return None
    images = dataset.tensors[0].as_subclass(Tensor).cpu()
    images = images.float() if images.is_floating_point() else images
    return ArraySource(label, images, labels) if images.dtype == like.dtype else None


def _hugging_face(data: Data, datasets: dict[str, Any], where: str) -> Splits:
    from accel_train.data.sources.hub import splits_of_tables

    for split, dataset in datasets.items():
        if dataset.format["type"] == "custom":
            raise UserError(
                f"{where}: {split} has a transform of its own, which would be left out. Remove it (set_format(None)): "
                "images are resized, augmented and normalised by the options of augment."
            )
    tables = {split: dataset.with_format(None) for split, dataset in datasets.items()}
    return splits_of_tables(data, tables, {split: split for split in tables})


def _map_style(dataset: Any, where: str) -> Any:
    """The dataset. Raises UserError unless it has a length and items."""
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        if isinstance(dataset, DataLoader):
            raise UserError(f"{where} is a DataLoader; expected its Dataset (loader.dataset). Batches are made here.")
        raise UserError(
            f"{where} is {kind_of(dataset)}, without a length or items by number; expected a map-style Dataset "
            "(__len__ and __getitem__), in which a sample can be found again after a restart."
        )
    if not len(dataset):
        raise UserError(f"{where} is empty.")
    return dataset


def _classes(datasets: dict[str, Any], where: str) -> tuple[str, ...] | None:
    """The names of the classes; None if the datasets have none. Raises UserError if the splits have different ones."""
    names: tuple[str, ...] | None = None
    for split, dataset in datasets.items():
        found = _own_classes(dataset, f"{where}: {split}")
        if names is None:
            names = found
        elif found is not None and found != names:
            first = f"{len(names)} there, {len(found)} here"
            if len(names) == len(found):
                label = next(label for label in range(len(names)) if names[label] != found[label])
                first = f"class {label} is {names[label]!r} there and {found[label]!r} here"
            raise UserError(f"{where}: {split} does not have the classes of the other splits ({first}).")
    return names


def _own_classes(dataset: Any, where: str) -> tuple[str, ...] | None:
    """The names that a dataset has; None: none. Raises UserError if it joins parts whose numbers mean other classes."""
    while isinstance(dataset, Subset) and not (hasattr(dataset, "classes") or hasattr(dataset, "num_classes")):
        dataset = dataset.dataset
    if isinstance(dataset, ConcatDataset) and not (hasattr(dataset, "classes") or hasattr(dataset, "num_classes")):
        named = {number: names for number, part in enumerate(dataset.datasets) if (names := _own_classes(part, where))}
        first = next(iter(named), 0)
        for number, names in named.items():
            if names != named[first]:
                raise UserError(
                    f"{where} joins datasets of other classes: part {first} has {first_of(named[first], 5)}, part "
                    f"{number} has {first_of(names, 5)}. The same number would mean two classes: map the labels to one "
                    "list of classes, and give the joined dataset this list as `classes`."
                )
        return named.get(first)
    if hasattr(dataset, "classes"):
        return tuple(map(str, dataset.classes))
    return tuple(map(str, range(int(dataset.num_classes)))) if hasattr(dataset, "num_classes") else None
