"""Loads a dataset by name. To add one:

- Of torchvision, with `train=`, `targets` and `classes`: a line in PUBLISHED (arrays.py).
- Any other: a function that takes `Data` and returns `Splits`, in a file beside this one, and its entry in LOADERS. If
  it downloads, it does so once for all processes: `_download` in arrays.py shows how.
"""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path

from accel_train import models
from accel_train.config.checks import check_root
from accel_train.config.schema import Config, Data
from accel_train.data.sources.arrays import PUBLISHED, digits, synthetic, torchvision_set
from accel_train.data.sources.divide import divide
from accel_train.data.sources.splits import Source, Splits, Subset
from accel_train.errors import UserError, nearest
from accel_train.user_code import parse_reference, short_name

__all__ = ["Source", "Splits", "Subset", "known_sources", "load_splits", "read_splits", "splits_of"]

IN_MEMORY = ("digits", *PUBLISHED, "synthetic")
"""Datasets whose images need no workers, unless images are augmented one by one."""
SYNTHETIC_SIZE = 32
"""Height and width of synthetic images, in pixels, where neither --model.image-size nor the model says it."""
LOADERS = {
    "folder": ("folder", "folder"),
    "csv": ("table", "table"),
    "wds": ("webdataset", "webdataset"),
    "hfds/NAME": ("hub", "hub"),
}
"""Name -> the module beside this one, and its function. It is imported when it is needed: many import much."""


def known_sources() -> tuple[str, ...]:
    """All names; for datasets of a hub, the prefix and NAME."""
    return (*IN_MEMORY, *LOADERS, "torch/NAME")


def splits_of(config: Config, *, download: bool = True) -> Splits:
    """The dataset of a recipe, with its splits; parameters as `load_splits` has them. Raises UserError."""
    size = SYNTHETIC_SIZE
    if config.data.name == "synthetic":
        size = models.input_size(config.model, SYNTHETIC_SIZE, config.origin)
    return load_splits(config.data, config.seed, size=size, download=download)


def load_splits(data: Data, seed: int, *, size: int = SYNTHETIC_SIZE, download: bool = True) -> Splits:
    """The dataset that `data` names, with its splits.

    The same on every process: a pure function of `data`, `seed` and the samples found. Call it on all processes at
    once: one of them downloads the missing files of published datasets, while the others wait. With `download=False`
    missing files are an error. `size`: height and width of synthetic images, in pixels. Raises UserError.
    """
    splits = read_splits(data, size=size, download=download)
    if splits.mistake:
        raise UserError(splits.mistake)
    return divide(splits, data, seed)


def read_splits(data: Data, *, size: int = SYNTHETIC_SIZE, download: bool = True) -> Splits:
    """The dataset before it is divided; it may have a `mistake`. Parameters as above. Raises UserError."""
    reference = parse_reference("data.name", data.name)
    if reference is not None:
        if data.stage is not None:
            raise UserError("--data.stage: nothing is copied for your own code that reads data; remove the option.")
        from accel_train.data.sources.user import user_data

        splits = user_data(data, reference)
    else:
        splits = _load(data, size, download)
    for option, column in (("image-column", data.image_column), ("label-column", data.label_column)):
        if column is not None and data.name.partition("/")[0] not in ("csv", "hfds"):
            raise UserError(
                f"--data.{option} {column}: only csv and hfds/NAME have columns, and --data.name is "
                f"'{short_name('data.name', data.name)}'; remove it."
            )
    return splits


def _load(data: Data, size: int, download: bool) -> Splits:
    copy: dict[str, Path] = {}
    if data.is_staged:
        from accel_train.data.sources.staging import staged

        copy["folder"] = staged(data, download=download)
    prefix, _, rest = data.name.partition("/")
    name = rest if prefix == "torch" else data.name  # timm's names for torchvision's datasets
    if name in PUBLISHED:
        return torchvision_set(name, data.root, download=download)
    check_root(data)
    if name == "digits":
        return digits()
    if name == "synthetic":
        return synthetic(data, size)
    kind = f"{prefix}/NAME" if rest else name
    if kind in LOADERS:
        module, function = LOADERS[kind]
        if module == "hub" and not (download or copy):
            raise UserError(f"the dataset '{data.name}' is not available here; training downloads it from its hub.")
        splits: Splits = getattr(importlib.import_module(f"{__package__}.{module}"), function)(data, **copy)
        return splits
    if name.lower().endswith(".csv"):
        raise UserError(f"--data.name {name}: for a table give --data.name csv --data.root {shlex.quote(name)}.")
    raise UserError(
        f"--data.name: unknown dataset '{data.name}'.{nearest(data.name, known_sources())} "
        f"Known datasets: {', '.join(known_sources())}, and your own FILE.py:FUNCTION."
    )


def resolve_mean_std(config: Config, splits: Splits) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel: the configured, else the pretrained weights', else the data's."""
    for name, values in (("mean", config.augment.mean), ("std", config.augment.std)):
        if values is not None and len(values) != splits.channels:
            raise UserError(
                f"--augment.{name}: found {len(values)} values; the images have {splits.channels} channels."
            )
    origin = config.origin
    if origin.mean is not None and origin.std is not None:
        mean, std = origin.mean, origin.std
    else:
        mean, std = models.pretrained_normalization(config.model) or (splits.mean, splits.std)
    if len(mean) != splits.channels:  # weights pretrained on colour images, used for grey ones, or the reverse
        mean, std = (sum(mean) / len(mean),) * splits.channels, (sum(std) / len(std),) * splits.channels
    return config.augment.mean or mean, config.augment.std or std
