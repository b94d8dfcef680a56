"""Names of data sets -> their splits. A new source is one function that returns Splits, and one line here."""

from __future__ import annotations

from accel_train.config.schema import Data
from accel_train.data.sources.splits import Source, Splits, Subset, divide
from accel_train.errors import UserError, nearest

__all__ = ["Source", "Splits", "Subset", "known_sources", "load_splits"]

ARRAYS = ("mnist", "fashion_mnist", "kmnist", "cifar10", "cifar100")
IN_MEMORY = ("digits", *ARRAYS, "synthetic")
"""Those whose images need no workers, unless each is augmented by itself."""
NAMES = ("digits", *ARRAYS, "folder", "cache", "synthetic", "tar", "wds")
PREFIXES = ("hfds/", "hfids/", "wds/", "tfds/", "torch/")


def known_sources() -> tuple[str, ...]:
    """All names, and the prefixes of those that go on with a name of a hub's."""
    return NAMES + tuple(f"{prefix}NAME" for prefix in PREFIXES)


def load_splits(data: Data, seed: int, *, download: bool = True) -> Splits:
    """The data set that `data` names, divided as it says.

    The same on every process: a pure function of `data`, `seed` and the samples found. Call it on all
    processes at once: missing files of published sets are downloaded by one of them, for which the others
    wait. With `download=False` missing files are an error. Raises UserError.
    """
    return divide(_load(data, download), data, seed)


def _load(data: Data, download: bool) -> Splits:
    prefix, _, rest = data.name.partition("/")
    name = rest if prefix == "torch" else data.name  # timm's way to name torchvision's sets
    if name in ARRAYS:
        from accel_train.data.sources.arrays import torchvision_set

        return torchvision_set(name, data.root, download=download)
    if name == "digits":
        from accel_train.data.sources.arrays import digits

        return digits()
    if name == "folder":
        from accel_train.data.sources.folder import folder

        return folder(data)
    if name == "cache":
        from accel_train.data.sources.cache import cache

        return cache(data)
    if name == "synthetic":
        from accel_train.data.sources.synthetic import synthetic

        return synthetic(data)
    if name == "tar":
        from accel_train.data.sources.tars import tar

        return tar(data)
    if prefix == "wds":
        from accel_train.data.sources.tars import webdataset

        return webdataset(data)
    if prefix in ("hfds", "hfids", "tfds") and rest:
        from accel_train.data.sources.hub import hub

        if not download:
            raise UserError(f"the data '{data.name}' is fetched from its hub when it is trained on.")
        return hub(data)
    raise UserError(
        f"--data.name '{data.name}' is no known data source.{nearest(data.name, known_sources())} "
        f"Known are {', '.join(known_sources())}."
    )
