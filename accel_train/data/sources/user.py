"""Datasets of a user's own function: `--data.name FILE.py:FUNCTION`.

The function returns a dict of map-style torch Datasets, "train" and any of "val" and "test", whose items are (image,
label); or a `Splits`, if it has a faster way to fetch batches. It is called with `root` (--data.root) if it takes that.

An item's image is a tensor, uint8 or float [C, H, W], of one size in the whole dataset; or a PIL image of any size,
which is resized and cropped like an image file. Floats are normalised with --augment.mean and --augment.std as they
are; the default is to leave them unchanged.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from accel_train.config.schema import Data
from accel_train.data.sources.arrays import ArraySource
from accel_train.data.sources.images import ImageError, default_mean_std, to_tensor
from accel_train.data.sources.splits import SPLIT_NAMES, Source, Splits, numbered, splits_of_files
from accel_train.errors import LOGGER, UserError, first_of, nearest, print_line
from accel_train.keyed import restored_generators, seed_generators
from accel_train.launch.process import is_first_process
from accel_train.user_code import OBJECT, Reference, call, described, known_labels, load, load_file

OPTION = "data.name"

KEPT_BYTES = 2**26  # of a pickled dataset, tensors and arrays not counted, that is kept for the next workers
ALIGNMENT = 64  # bytes, a multiple of the size of every dtype's element

Label = int | list[int]
"""The number of a class, or for each class whether the image has it: 0 or 1."""


class UserDataset:
    """A source whose samples are the items of a user's Dataset.

    Before an item is fetched for training or evaluation, torch's, NumPy's and Python's global generators are seeded
    with the sample's key. So a Dataset that draws from them draws the same for a sample on any number of processes and
    workers, and after a restart; generators of its own it must seed by itself.
    """

    in_memory = False

    def __init__(
        self,
        dataset: Any,
        reference: Reference,
        split: str,
        labels: Tensor,
        channels: int,
        shape: torch.Size | None,
        dtype: torch.dtype = torch.uint8,
    ) -> None:
        """`labels`: int64 [n]. `channels`: of PIL images. `shape`: [C, H, W] of all images; None: PIL images. `dtype`:
        of the pixels of all images."""
        self.dataset, self.reference, self.split = dataset, reference, split
        self.labels, self.channels, self.shape = labels, channels, shape
        self.dtype = dtype
        self.one_size = shape is not None
        self.packed: Packed | None = None  # what data workers are sent

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, id: int) -> str:
        return f"{self.split} sample {id}"

    def fetch(self, ids: Sequence[int]) -> Tensor | list[Tensor]:
        return self.fetch_seeded(ids, torch.as_tensor(ids, dtype=torch.int64))

    def fetch_seeded(self, ids: Sequence[int], keys: Tensor) -> Tensor | list[Tensor]:
        """As `fetch`; `keys`: int64 [b], what the samples' random numbers follow from."""
        images = []
        with restored_generators():
            for id, key in zip(ids, keys.tolist(), strict=True):
                seed_generators(key)
                images.append(self._image(int(id)))
        return torch.stack(images) if self.one_size else images

    def _image(self, id: int) -> Tensor:
        image, label = read_item(self.dataset, id, self.reference, self.name(id))
        if label != (known := as_label(self.labels[id])):
            raise self._error(
                f"{self.name(id)} has the label {label}, but {known} in its dataset's `targets` (or in the labels that "
                "were read before). A sample's label must not change"
            )
        try:
            pixels = as_pixels(image, self.channels)
        except ImageError as error:
            raise self._error(f"{self.name(id)} cannot be read: {error}") from error
        if pixels is None:
            raise self._error(f"{self.name(id)} is {kind_of(image)}; {EXPECTED}")
        fits = len(pixels) == self.channels if self.shape is None else pixels.shape == self.shape
        if pixels.dtype != self.dtype or not fits:
            kind = str(self.dtype).removeprefix("torch.")
            size = f"{self.channels} channels (--data.channels)" if self.shape is None else f"shape {list(self.shape)}"
            raise self._error(
                f"{self.name(id)} is {kind_of(image)}, but the first one is {kind} with {size}: all images must be of "
                "one kind, because 1 is white in floats and 255 in the others, and tensors of one size. Resize them in "
                "the Dataset, or return PIL images, which are resized and cropped"
            )
        return pixels

    def _error(self, text: str) -> UserError:
        return UserError(f"--{OPTION} {self.reference.short}: {text}.", every_process=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"dataset": self._pack(), "packed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.reference.file:  # in which the dataset's class is defined
            load_file(Path(self.reference.file))
        self.dataset = self.dataset.unpack()

    def _pack(self) -> Packed:
        """The dataset, packed once for all workers. A large one that is mostly no tensors is not kept twice; nor are
        tensors, because this process, too, then uses views of what is packed."""
        if self.packed is not None:
            return self.packed
        packed = Packed(self.dataset)
        if len(packed.pickled) <= KEPT_BYTES:
            self.packed, self.dataset = packed, packed.unpack()
        return packed

    def stays_here(self) -> bool:
        """Whether it is an object of this program that no data worker can make: then the first start says so."""
        if self.reference.module != OBJECT:
            return False
        try:
            self.check_picklable()
        except UserError as error:
            if self.split == "train" and is_first_process():
                LOGGER.warning(f"loading images in this process, without workers. {error}")
            return True
        return False

    def check_picklable(self) -> None:
        """Raise UserError if the dataset cannot be sent to a data worker."""
        advice = "Define its class and its functions at the top of the file, without lambda"
        if self.reference.module == OBJECT:
            advice = "Import its class and its functions from a file of their own"
        try:
            packed = self._pack()
            if self.reference.module == OBJECT and b"__main__" in packed.pickled:
                raise TypeError("it is defined in the program itself")
        except Exception as error:
            raise UserError(
                f"--{OPTION} {self.reference.short}: the {self.split} dataset cannot be sent to data workers "
                f"({described(error, self.reference).rstrip('.')}). {advice}, or load in this process: "
                "--data.workers 0."
            ) from error


EXPECTED = "expected a PIL image, a uint8 tensor [C, H, W] or a float tensor [C, H, W]"


def read_item(dataset: Any, id: int, reference: Reference, name: str) -> tuple[Any, Label]:
    """The image and the label of an item. Raises UserError."""
    where = f"--{OPTION} {reference.short}: {name}"
    try:
        item = dataset[id]
    except Exception as error:
        raise UserError(f"{where} cannot be read: {described(error, reference)}", every_process=False) from error
    if not (isinstance(item, (tuple, list)) and len(item) == 2):
        raise UserError(f"{where} is {kind_of(item)}; expected a pair (image, label).", every_process=False)
    try:
        return item[0], as_label(item[1])
    except (TypeError, ValueError):
        raise UserError(
            f"{where} has the label {str(item[1])[:40]!r} ({type(item[1]).__name__}); expected a whole number, or "
            "a row of 0 and 1 for several labels.",
            every_process=False,
        ) from None


def as_label(value: Any) -> Label:
    """A whole number, or a row of 0 and 1, also of NumPy's or in a tensor. Raises TypeError or ValueError."""
    if isinstance(value, (Tensor, np.ndarray)):
        value = value.tolist()
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if isinstance(value, (list, tuple)):
        if any(number not in (0, 1) for number in value):
            raise ValueError(value)
        return [int(number) for number in value]
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(value)
    if isinstance(value, (str, bytes)):
        raise TypeError(value)
    return int(value)


def _is_pillows(image: Any) -> bool:
    """Whether it is an image of Pillow, which whoever has one has imported."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(image, pillow.Image)


def as_pixels(image: Any, channels: int) -> Tensor | None:
    """An item's image as a tensor, uint8 or float32 [C, H, W]; None if it is of another kind. Raises ImageError."""
    if _is_pillows(image):
        return to_tensor(image, channels)
    if not isinstance(image, Tensor) or image.ndim != 3:
        return None
    image = image.as_subclass(Tensor)  # torchvision has classes of its own
    if image.is_floating_point():
        floats: Tensor = image.float()
        return floats
    return image if image.dtype == torch.uint8 else None


def kind_of(value: Any) -> str:
    """What a value is, in words: "an int64 tensor [3, 8, 8]"."""
    if isinstance(value, Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"a NumPy array {value.dtype} {list(value.shape)}"
    return f"of type {type(value).__name__}"


# A user's Dataset on its way to data workers: in one block of shared memory, however many tensors it keeps.
#
# torch sends the memory of each tensor by a file descriptor of its own, and a worker can be sent some 250. Here the
# bytes of all tensors and of NumPy's arrays lie one after the other, and each worker has views of them.


class Packed:
    """An object, pickled, beside the bytes of its tensors and arrays. May itself be sent to any number of workers."""

    def __init__(self, value: Any) -> None:
        """Raises what pickling `value` raises."""
        stream, buffers = BytesIO(), list[pickle.PickleBuffer]()
        _Pickler(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(value)
        self.pickled = stream.getvalue()
        parts = [buffer.raw() for buffer in buffers]
        ends = np.cumsum([-(-len(part) // ALIGNMENT) * ALIGNMENT for part in parts], dtype=np.int64).tolist()
        self.places = [slice(first, first + len(part)) for first, part in zip([0, *ends], parts, strict=False)]
        self.block = torch.empty(max(1, *ends, 1), dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        memory = memoryview(self.block.numpy())
        for place, part in zip(self.places, parts, strict=True):
            memory[place] = part

    def unpack(self) -> Any:
        """The object; its tensors and arrays are views of the shared memory."""
        memory = memoryview(self.block.numpy())
        return pickle.loads(self.pickled, buffers=[memory[place] for place in self.places])


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """A tensor as an array of bytes, which NumPy pickles beside the stream. One that is not plain numbers in memory
        is pickled by value."""
        if isinstance(value, torch.storage.TypedStorage):
            return value.__reduce__()  # type: ignore[no-untyped-call]
        if not isinstance(value, Tensor):
            return NotImplemented
        plain = value.device.type == "cpu" and value.layout == torch.strided and not value.is_quantized
        if not plain or value.requires_grad or value.is_conj() or value.is_neg():
            return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        own = value.as_subclass(Tensor)
        content = own.reshape(-1).contiguous().view(torch.uint8).numpy()
        arguments = (type(value), content, own.dtype, tuple(own.shape))
        return (_rebuild, arguments, value.__dict__) if value.__dict__ else (_rebuild, arguments)


def _rebuild(kind: type[Tensor], content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor of the class `kind`, which is a view of the bytes of its `content`."""
    tensor = torch.from_numpy(content).view(dtype).view(shape)
    return tensor if kind is Tensor else tensor.as_subclass(kind)


def labels_of(dataset: Any, reference: Reference, split: str) -> Tensor:
    """The labels of all items, int64 [n], or bool [n, classes] if they are rows of 0 and 1: its `targets`, else read
    item by item. Collective. Raises UserError."""
    where = f"--{OPTION} {reference.short}: {split}"
    try:
        targets = known_labels(dataset)
        labels = None if targets is None else torch.tensor(targets)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} has `targets` that are not whole numbers ({error}).") from error
    if labels is not None:
        if labels.ndim == 2 and len(labels) == len(dataset) and bool(((labels == 0) | (labels == 1)).all()):
            return labels.bool()
        if labels.is_floating_point() or labels.ndim != 1 or len(labels) != len(dataset):
            raise UserError(
                f"{where} has {len(dataset)} items, and `targets` of {str(labels.dtype).removeprefix('torch.')} "
                f"{list(labels.shape)}; expected a whole number for each item, or a row of 0 and 1 for several labels."
            )
        return labels.long()
    return _read_labels(dataset, reference, split)


def _read_labels(dataset: Any, reference: Reference, split: str) -> Tensor:
    """Read all items for their labels. The processes share the work. Collective."""
    rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if rank == 0:
        what = f"reading the labels of {len(dataset)} {split} samples at each start"
        print_line(f"{what}: {reference.short} gives no `targets`", sys.stderr)
    own: list[Label] | str
    try:
        with restored_generators():
            own = []
            for id in range(rank, len(dataset), processes):
                seed_generators(id)
                own.append(read_item(dataset, id, reference, f"{split} sample {id}")[1])
    except UserError as error:
        own = str(error)
    everyone: list[list[Label] | str | None] = [own]
    if processes > 1:
        everyone = [None] * processes
        dist.all_gather_object(everyone, own)
    for found in everyone:
        if isinstance(found, str):
            raise UserError(found)
    labels: list[Label] = [0] * len(dataset)
    for number, found in enumerate(everyone):
        labels[number::processes] = cast("list[Label]", found)
    if all(isinstance(label, int) for label in labels):
        return torch.tensor(labels, dtype=torch.int64)
    lengths = [len(label) if isinstance(label, list) else 0 for label in labels]
    other = next((id for id, length in enumerate(lengths) if length != lengths[0]), None)
    if other is not None:
        words = [f"a row of {length} numbers" if length else "one number" for length in (lengths[0], lengths[other])]
        raise UserError(
            f"--{OPTION} {reference.short}: {split} sample {other} has {words[1]} as its label, but sample 0 has "
            f"{words[0]}; expected the same of all."
        )
    return torch.tensor(labels, dtype=torch.bool)


def user_data(data: Data, reference: Reference) -> Splits:
    """The splits that the user's function returns. Collective if labels have to be read. Raises UserError."""
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
        pixels = as_pixels(image, data.channels)
    except ImageError as error:
        raise UserError(f"{where}: train sample 0 cannot be read: {error}.") from error
    if pixels is None:
        raise UserError(f"{where}: train sample 0 is {kind_of(image)}; {EXPECTED}.")
    shape = None if _is_pillows(image) else pixels.shape
    if shape is not None and shape[1] != shape[2]:
        raise UserError(
            f"{where}: the images are tensors of {shape[1]}x{shape[2]} pixels; expected squares. Crop or resize them "
            "in the Dataset, or return PIL images, which are resized and cropped."
        )
    labels = {split: labels_of(dataset, reference, split) for split, dataset in datasets.items()}
    classes = classes or numbered(where, labels.values())
    sources: dict[str, Source] = {
        split: _in_memory(dataset, f"{short} {split}", labels[split], pixels)
        or UserDataset(dataset, reference, split, labels[split], data.channels, shape, pixels.dtype)
        for split, dataset in datasets.items()
    }
    channels = pixels.shape[0]
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
        full_scale=1 if is_float else 255,
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
