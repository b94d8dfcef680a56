"""Sources of encoded images (JPEG, PNG, …), decoded when they are fetched."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch

from accel_train.config.schema import Data
from accel_train.data.sources.files.images import MAX_PIXELS, Box, ImageError, LazyImage
from accel_train.errors import UserError
from accel_train.untrusted import TooLargeError, read_regular_file

BYTES_OF_PIXEL = 8
"""Four channels of 16 bits, not compressed."""
BYTES_OF_HEADERS = 1 << 26
MAX_BYTES = BYTES_OF_HEADERS + BYTES_OF_PIXEL * MAX_PIXELS
"""The bytes that the file of an image can have, in any format."""


class EncodedImages(ABC):
    """A source whose images are stored in encoded form and decoded when they are fetched."""

    in_memory = False

    def __init__(self, labels: torch.Tensor, data: Data) -> None:
        """labels: int64 [n]; data: the options of the data set."""
        self.labels, self.channels, self.check_command = labels, data.channels, check_command(data)

    @abstractmethod
    def read(self, id: int) -> bytes:
        """The bytes of the encoded image. Raises OSError."""

    @abstractmethod
    def name(self, id: int) -> str: ...

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, ids: Sequence[int]) -> torch.Tensor | list[torch.Tensor]:
        return [self.open(int(id)).pixels() for id in ids]

    def open(self, id: int) -> LazyImage:
        """The image, of which only the header has been read. Raises UserError, as does its `pixels()`."""
        try:
            return _SourceImage(self, id)
        except (ImageError, OSError) as error:
            raise self.unreadable(id, error) from ImageError(_reason(error))

    def unreadable(self, id: int, error: Exception) -> UserError:
        """The error to raise for an image that cannot be read because of `error`."""
        advice = f"`{self.check_command}` lists all such images; --data.skip-unreadable LIST skips them."
        if isinstance(error, ChangedError):
            advice = "If that is meant, run `touch` on its tar file: the next start then reads the headers again."
        return UserError(f"{self.name(id)} cannot be read: {_reason(error)}. {advice}", every_process=False)


class ChangedError(OSError):
    """An image is not the one that the index describes."""


class _SourceImage(LazyImage):
    """An image whose errors name it and its source."""

    def __init__(self, source: EncodedImages, id: int) -> None:
        self.source, self.id = source, id
        super().__init__(source.read(id), source.channels)

    def pixels(self) -> torch.Tensor:
        try:
            return super().pixels()
        except ImageError as error:
            raise self.source.unreadable(self.id, error) from error

    def reduced(
        self, box: Box, height: int, width: int, reduction: int, interpolation: str = "bilinear"
    ) -> torch.Tensor:
        try:
            return super().reduced(box, height, width, reduction, interpolation)
        except ImageError as error:
            raise self.source.unreadable(self.id, error) from error


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def read_image(path: Path) -> bytes:
    """The bytes of an image file. Raises ImageError if they are more than MAX_BYTES, and OSError.

    A pipe or a device is an OSError, too: reading it could take for ever.
    """
    try:
        return read_regular_file(path, MAX_BYTES, follow=True)
    except TooLargeError as error:
        raise ImageError(f"it has {error.strerror}") from error


def check_command(data: Data) -> str:
    """The command that lists the unreadable images of `data`."""
    words = ["accel-train", "check-data", data.name, "--data.root", str(data.root)]
    given = {"image-column": data.image_column, "label-column": data.label_column, "stage": data.stage}
    for option, value in given.items():
        words += [] if value is None else [f"--data.{option}", str(value)]
    return shlex.join(words)
