"""Datasets of a user's own function: `--data.name FILE.py:FUNCTION`.

The function returns a dict of map-style torch Datasets, "train" and any of "val" and "test", whose items are (image,
label); or a `Splits`, if it has a faster way to fetch batches. It is called with `root` (--data.root) if it takes that.

An item's image is a tensor, uint8 or float [C, H, W], of one size in the whole dataset; or a PIL image of any size,
which is resized and cropped like an image file. Floats are normalised with --augment.mean and --augment.std as they
are; the default is to leave them unchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils.data import IterableDataset, Subset

from accel_train.config.schema import Data
from accel_train.config.semantics import IMAGE_FILES
from accel_train.data.sources.files.depth import few_bits_notes, largest_of_16_bits
from accel_train.data.sources.files.images import ImageError, default_mean_std
from accel_train.data.sources.splits import SPLIT_NAMES, Source, Splits
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
from accel_train.errors import UserError, nearest
from accel_train.user_code.loading import call, load
from accel_train.user_code.reference import Reference


def user_data(data: Data, reference: Reference, record: Path | None) -> Splits:
    """The splits that the user's function returns. Collective if labels have to be read.

    `record`: folder in which the main process keeps labels that had to be read item by item. Raises UserError.
    """
    returned = call(OPTION, reference, load(OPTION, reference), {"root": data.root}, {})
    where = f"--{OPTION} {reference.short}"
    if isinstance(returned, Splits):
        return returned
    if not isinstance(returned, dict):
        raise UserError(f'{where}: returned a value {kind_of(returned)}; expected a dict {{"train": Dataset, …}}.')
    datasets: dict[str, Any] = {}
    for name, dataset in returned.items():
        if name not in SPLIT_NAMES:
            hint = nearest(str(name), SPLIT_NAMES)
            raise UserError(f"{where}: returned a split {str(name)!r}; expected train, val or test.{hint}")
        if dataset is not None:
            datasets[SPLIT_NAMES[name]] = _map_style(dataset, f"{where}: {name}")
    if "train" not in datasets:
        raise UserError(f"{where}: returned no split 'train', only {', '.join(map(str, returned)) or 'none'}.")
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
    sources: dict[str, Source] = {
        split: UserDataset(
            dataset,
            reference,
            split,
            labels_of(dataset, reference, split, record),
            data.channels,
            shape,
            data.range,
            pixels.dtype,
        )
        for split, dataset in datasets.items()
    }
    channels = pixels.shape[0]
    largest = largest_of_16_bits(image, b"") if isinstance(image, Image.Image) else None
    is_float = pixels.is_floating_point()
    if is_float:
        mean, std = (0.0,) * channels, (1.0,) * channels
    else:
        mean, std = default_mean_std(channels) if channels in (1, 3) else ((0.5,) * channels, (0.25,) * channels)
    return Splits(
        classes,
        channels,
        None if shape is None else shape[1],
        mean,
        std,
        sources["train"],
        sources.get("validation"),
        sources.get("test"),
        # Only then: a Dataset may call something else its weights.
        train_weights=weights_of(train, reference) if data.sampler == "weights" else None,
        notes=tuple(few_bits_notes([largest])) if data.range is None and largest is not None else (),
        semantics=IMAGE_FILES,
        full_scale=1 if is_float else 255,
        value_range=data.range if shape is None else None,
    )


def _map_style(dataset: Any, where: str) -> Any:
    """The dataset. Raises UserError unless it has a length and items."""
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(
            f"{where} is {kind_of(dataset)}, without a length or items by number; expected a map-style Dataset "
            "(__len__ and __getitem__), in which a sample can be found again after a restart."
        )
    if not len(dataset):
        raise UserError(f"{where} is empty.")
    return dataset


def _classes(datasets: dict[str, Any], where: str) -> tuple[str, ...]:
    """The names of the classes. Raises UserError if there are none, or if the splits have different ones."""
    names: tuple[str, ...] | None = None
    for split, dataset in datasets.items():
        found = _own_classes(dataset)
        if names is None:
            names = found
        elif found is not None and found != names:
            first = f"{len(names)} there, {len(found)} here"
            if len(names) == len(found):
                label = next(label for label in range(len(names)) if names[label] != found[label])
                first = f"class {label} is {names[label]!r} there and {found[label]!r} here"
            raise UserError(f"{where}: {split} does not have the classes of the other splits ({first}).")
    if names is None:
        raise UserError(
            f"{where}: the train dataset has no `classes`: give it an attribute with their names, such as "
            '`dataset.classes = ["cat", "dog"]`, or `num_classes` with their number.'
        )
    return names


def _own_classes(dataset: Any) -> tuple[str, ...] | None:
    while isinstance(dataset, Subset) and not (hasattr(dataset, "classes") or hasattr(dataset, "num_classes")):
        dataset = dataset.dataset
    if hasattr(dataset, "classes"):
        return tuple(map(str, dataset.classes))
    return tuple(map(str, range(int(dataset.num_classes)))) if hasattr(dataset, "num_classes") else None
