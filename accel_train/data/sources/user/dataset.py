"""The items of a user's Dataset as a source of samples."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from accel_train.data.sources.files.depth import ValueRange
from accel_train.data.sources.files.images import ImageError, to_tensor
from accel_train.data.sources.user.packed import Packed
from accel_train.errors import LOGGER, UserError
from accel_train.launch.environment import is_first_process
from accel_train.user_code.loading import described, load_file
from accel_train.user_code.reference import OBJECT, Reference

OPTION = "data.name"

KEPT_BYTES = 2**26  # of a pickled dataset, tensors not counted, that is kept for the next workers

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
        value_range: ValueRange | None = None,
        dtype: torch.dtype = torch.uint8,
    ) -> None:
        """`labels`: int64 [n]. `channels`, `value_range`: of PIL images. `shape`: [C, H, W] of all images; None: PIL
        images. `dtype`: of the pixels of all images."""
        self.dataset, self.reference, self.split = dataset, reference, split
        self.labels, self.channels, self.shape, self.value_range = labels, channels, shape, value_range
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
            pixels = as_pixels(image, self.channels, self.value_range)
        except ImageError as error:
            raise self._error(f"{self.name(id)} cannot be read: {error}") from error
        if pixels is None:
            raise self._error(f"{self.name(id)} is {kind_of(image)}; {EXPECTED}")
        if pixels.dtype != self.dtype:
            first = "pixels of 8 bits" if self.dtype == torch.uint8 else "pixels that are floats"
            raise self._error(
                f"{self.name(id)} is {kind_of(image)}, but the first one has {first}: all images must "
                "be of one kind, because 1 is white in floats, and 255 in the others"
            )
        if self.shape is None and len(pixels) != self.channels:
            raise self._error(
                f"{self.name(id)} is {kind_of(image)}, but the first one is a PIL image of which {self.channels} "
                f"channel{'s' * (self.channels > 1)} are used (--data.channels)"
            )
        if self.shape is not None and pixels.shape != self.shape:
            raise self._error(
                f"{self.name(id)} has the shape {list(pixels.shape)}, but the first one {list(self.shape)}: tensors "
                "must have one size. Resize them in the Dataset, or return PIL images, which are resized and cropped"
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
        """The dataset, packed once for all workers. A large one that is mostly no tensors is not kept twice."""
        packed = self.packed or Packed(self.dataset)
        if len(packed.pickled) <= KEPT_BYTES:
            self.packed = packed
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


def as_pixels(image: Any, channels: int, value_range: ValueRange | None = None) -> Tensor | None:
    """An item's image as a tensor, uint8 or float32 [C, H, W]; None if it is of another kind. Raises ImageError."""
    if isinstance(image, Image.Image):
        return to_tensor(image, channels, value_range)
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


def seed_generators(key: int) -> None:
    """Seed the global generators of torch (on the CPU), NumPy and Python."""
    torch.default_generator.manual_seed(key)
    np.random.seed(key % 2**32)
    random.seed(key)


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restore at the end what `seed_generators` changes."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
