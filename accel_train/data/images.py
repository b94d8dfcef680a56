"""Image files: finding them, and decoding them strictly.

A damaged image is an error here, never a grey half or another image in its place.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from accel_train.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""As torchvision's ImageFolder has them: other files (Thumbs.db, notes) are no images."""

END_OF_JPEG = b"\xff\xd9"

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalisation(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation for image files: ImageNet's; for grey ones the mean of its channels'."""
    if channels == 1:
        return (0.449,), (0.226,)
    return IMAGENET_MEAN, IMAGENET_STD


class ImageError(ValueError):
    """Why an image cannot be decoded."""


def is_image(name: str) -> bool:
    """Whether a file of this name (the last part of a path) counts as an image."""
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


def find_images(root: Path) -> tuple[list[str], list[str]]:
    """(images, folders) below `root`: sorted paths relative to it, with "/". Hidden ones are left out.

    Raises UserError if a folder cannot be read.
    """
    images: list[str] = []
    folders: list[str] = []

    def refuse(error: OSError) -> None:  # os.walk would go on without the folder
        raise UserError(f"the folder {error.filename} cannot be read: {error.strerror}.")

    for where, below, files in os.walk(root, onerror=refuse, followlinks=True):
        below[:] = [name for name in below if not name.startswith(".")]
        here = Path(where).relative_to(root).as_posix()
        prefix = "" if here == "." else here + "/"
        folders += [prefix + name for name in below]
        images += [prefix + name for name in files if is_image(name)]
    return sorted(images), sorted(folders)


def decode(data: bytes, channels: int) -> torch.Tensor:
    """The image in `data`, as uint8 [channels, H, W]; see `Picture`. Raises ImageError."""
    return Picture(data, channels).pixels()


class Picture:
    """An encoded image, whose size is known before its pixels are decoded.

    The format is found from the content, not from a file's name. Of 16 bits the upper 8 count; transparency
    is dropped and the EXIF orientation not applied, as in torchvision's ImageFolder.
    """

    def __init__(self, data: bytes, channels: int) -> None:
        """channels: 3 (RGB) or 1 (grey). Raises ImageError."""
        from PIL import Image

        if not data:
            raise ImageError("the file is empty")
        self.data, self.channels = data, channels
        with _strictly():
            self.image = Image.open(io.BytesIO(data))
        self.width, self.height = self.image.size

    def whole_jpeg(self) -> bytes | None:
        """The file, if it is a JPEG as GPUs decode them: coloured or grey, not CMYK, and with its end."""
        usual = self.image.format == "JPEG" and self.image.mode in ("RGB", "L")
        return self.data if usual and self.data.endswith(END_OF_JPEG) else None

    def pixels(self, reduction: int = 1) -> torch.Tensor:
        """uint8 [channels, H, W]. Raises ImageError.

        `reduction` (1, 2, 4 or 8) allows a JPEG to come smaller by up to this factor, each side rounded up, for less
        work: its decoder leaves out the fine frequencies. The same pixels each time, but not those of a resize.
        """
        with _strictly(), self.image as image:
            if image.format == "JPEG" and image.mode in ("RGB", "L"):
                if reduction == 1:
                    found = _decode_jpeg(self.data, self.channels)
                    if found is not None:
                        return found
                else:
                    image.draft(None, (self.width // reduction, self.height // reduction))
            return _to_tensor(image, self.channels)


@contextlib.contextmanager
def _strictly() -> Iterator[None]:
    """Whatever a reader does not understand becomes an ImageError."""
    from PIL import UnidentifiedImageError

    with warnings.catch_warnings():
        # PIL warns of odd metadata, which do not matter here; torchvision of its decoders' future.
        warnings.simplefilter("ignore")
        try:
            yield
        except UnidentifiedImageError:
            raise ImageError("it is no image of a known format") from None
        except MemoryError:
            raise
        except Exception as error:  # PIL's readers raise nearly anything on damaged data: SyntaxError, struct.error, …
            raise ImageError(str(error) or type(error).__name__) from error


def as_tensor(file: bytes) -> torch.Tensor:
    """Its bytes, uint8 [n]; a copy, for tensors may be written to."""
    return torch.frombuffer(bytearray(file), dtype=torch.uint8)


def _decode_jpeg(data: bytes, channels: int) -> torch.Tensor | None:
    """With torchvision, faster than PIL and to the same pixels; None if it fails: PIL has the last word."""
    try:
        from torchvision.io import ImageReadMode, decode_jpeg

        mode = ImageReadMode.GRAY if channels == 1 else ImageReadMode.RGB
        pixels: torch.Tensor = decode_jpeg(as_tensor(data), mode=mode)
    except (ImportError, RuntimeError):
        return None
    return pixels


def _to_tensor(image: Image.Image, channels: int) -> torch.Tensor:
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits, which PIL's own conversion would clip at 255
        image = Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))
    elif image.mode in ("P", "PA"):  # a palette may hold transparent colours
        image = image.convert("RGBA")
    if image.mode not in ("1", "L", "LA"):
        image = image.convert("RGB")
    pixels = np.array(image.convert("L" if channels == 1 else "RGB"))
    return torch.from_numpy(pixels if channels == 3 else pixels[..., None]).permute(2, 0, 1)


class EncodedImages(ABC):
    """A source whose images lie somewhere in encoded form (JPEG, PNG, …) and are decoded when fetched."""

    in_memory = False

    def __init__(self, labels: torch.Tensor, channels: int, check_command: str) -> None:
        """labels: int64 [n]. check_command: the command line that finds all unreadable images."""
        self.labels, self.channels, self.check_command = labels, channels, check_command

    @abstractmethod
    def read(self, id: int) -> bytes:
        """The encoded image; raises OSError."""

    @abstractmethod
    def name(self, id: int) -> str: ...

    def states(self) -> Iterable[str]:
        """What is not the same after an image has been changed, such as sizes and times of files. Raises OSError."""
        return ()

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, ids: Sequence[int]) -> torch.Tensor | list[torch.Tensor]:
        return [self.open(int(id)).pixels() for id in ids]

    def open(self, id: int) -> Picture:
        """An image of which only the size is known yet. Raises UserError, as do its `pixels`."""
        try:
            return _SourcePicture(self, id)
        except (ImageError, OSError) as error:
            raise self.unreadable(id, error) from ImageError(_reason(error))

    def unreadable(self, id: int, error: Exception) -> UserError:
        return UserError(
            f"{self.name(id)} cannot be read: {_reason(error)}. `{self.check_command}` lists all such images; "
            "--data.skip-unreadable LIST leaves them out.",
            every_process=False,
        )


class _SourcePicture(Picture):
    def __init__(self, source: EncodedImages, id: int) -> None:
        self.source, self.id = source, id
        super().__init__(source.read(id), source.channels)

    def pixels(self, reduction: int = 1) -> torch.Tensor:
        try:
            return super().pixels(reduction)
        except ImageError as error:
            raise self.source.unreadable(self.id, error) from error


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


class Names:
    """Many strings in two arrays: a list of a million would be copied, in time, into each worker."""

    def __init__(self, names: Sequence[str]) -> None:
        encoded = [name.encode(errors="surrogateescape") for name in names]
        self.text = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self.ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)

    @classmethod
    def of(cls, text: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> Names:
        """Of the two arrays."""
        names = cls([])
        names.text, names.ends = text, ends
        return names

    def __getitem__(self, id: int) -> str:
        start = self.ends[id - 1] if id else 0
        return self.text[start : self.ends[id]].tobytes().decode(errors="surrogateescape")


def file_state(path: Path) -> str:
    """Size and time of a file; "missing" without it."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return "missing"
    return f"{found.st_size} {found.st_mtime_ns}"


class FileImages(EncodedImages):
    """Image files below a folder."""

    def __init__(
        self, root: Path, paths: Sequence[str], labels: torch.Tensor, channels: int, check_command: str
    ) -> None:
        super().__init__(labels, channels, check_command)
        self.root, self.paths = root, Names(paths)

    def read(self, id: int) -> bytes:
        return (self.root / self.paths[id]).read_bytes()

    def name(self, id: int) -> str:
        return f"{self.root}/{self.paths[id]}"

    def states(self) -> Iterable[str]:
        return (file_state(self.root / self.paths[id]) for id in range(len(self)))
