"""Image files: finding them, and decoding them strictly.

A damaged image is an error here, never a grey half or another image in its place.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from PIL import Image


END_OF_JPEG = b"\xff\xd9"


ENDS = {"JPEG": END_OF_JPEG, "PNG": b"IEND\xaeB`\x82"}


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def default_mean_std(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation for image files: ImageNet's; for grey ones the mean of its channels'."""
    if channels == 1:
        return (0.449,), (0.226,)
    return IMAGENET_MEAN, IMAGENET_STD


MAX_PIXELS = 178_956_970  # twice the number from which Pillow warns of a "decompression bomb"


Box = tuple[int, int, int, int]
"""Top, left, height and width, in pixels."""


class ImageError(ValueError):
    """Why an image cannot be decoded."""


def decode(data: bytes, channels: int, max_pixels: int = MAX_PIXELS) -> torch.Tensor:
    """The image in `data`, as uint8 [channels, H, W]; see `LazyImage`. Raises ImageError."""
    return LazyImage(data, channels, max_pixels).pixels()


class LazyImage:
    """An encoded image, whose size is known before its pixels are decoded.

    The format is found from the content, not from a file's name. It is turned as its EXIF orientation says, and so are
    `height` and `width`. Of 16 bits the upper 8 count; transparency is dropped, as in torchvision's ImageFolder.
    """

    reducible = False
    """Whether it can be decoded smaller: a JPEG, coloured or grey, not CMYK."""

    def __init__(self, data: bytes, channels: int, max_pixels: int = MAX_PIXELS) -> None:
        """channels: 3 (RGB) or 1 (grey); max_pixels: a larger image is refused. Raises ImageError."""
        from PIL import Image

        if not data:
            raise ImageError("the file is empty")
        self.data, self.channels = data, channels
        Image.MAX_IMAGE_PIXELS = None  # Pillow's limit is the process's; ours comes below
        with _strictly():
            self.image = Image.open(io.BytesIO(data))
        self.width, self.height = self.image.size
        if self.width * self.height > max_pixels:
            raise ImageError(
                f"it has {self.width * self.height:,} pixels, more than max-pixels ({max_pixels:,}): a file may be "
                "made to fill the memory; raise the limit if it is to be trusted"
            )
        with _strictly():
            self.orientation = _orientation(self.image, data)
        if self.orientation >= 5:
            self.width, self.height = self.height, self.width
        self.reducible = self.image.format == "JPEG" and self.image.mode in ("RGB", "L")

    def whole_jpeg(self) -> bytes | None:
        """The file, if it is a JPEG as GPUs decode them: coloured or grey, not CMYK, and with its end."""
        return self.data if self.reducible and self.data.endswith(END_OF_JPEG) else None

    def looks_truncated(self) -> bool:
        """Whether the file does not end as its format does: it is cut short, or has something behind its end."""
        return not self.data.endswith(ENDS.get(self.image.format or "", b""))

    def pixels(self) -> torch.Tensor:
        """uint8 [channels, H, W]. Raises ImageError."""
        with _strictly(), self.image as image:
            pixels = _decode_jpeg(self.data, self.channels) if self.reducible else None
            return apply_orientation(_to_tensor(image, self.channels) if pixels is None else pixels, self.orientation)

    def reduced(self, box: Box, height: int, width: int, reduction: int) -> torch.Tensor:
        """The box of a `reducible` image, brought to uint8 [channels, height, width]. Raises ImageError.

        The JPEG is decoded `reduction` (2, 4 or 8) times smaller, for less work: its decoder leaves out the fine
        frequencies. The same pixels each time, but not quite those of the whole image.
        """
        top, left, high, wide = self._stored(box)
        if self.orientation >= 5:
            height, width = width, height
        with _strictly(), self.image as image:
            image.draft(None, (image.width // reduction, image.height // reduction))
            corners = (left / reduction, top / reduction, (left + wide) / reduction, (top + high) / reduction)
            from PIL import Image

            whole = image.convert("L" if self.channels == 1 else "RGB")
            found = np.array(whole.resize((width, height), Image.Resampling.BILINEAR, box=corners))
        return apply_orientation(_as_tensor(found), self.orientation)

    def _stored(self, box: Box) -> Box:
        """Where the box lies in the image as it is stored."""
        top, left, height, width = box
        if self.orientation in FLIPPED[2]:
            left = self.width - left - width
        if self.orientation in FLIPPED[1]:
            top = self.height - top - height
        return (left, top, width, height) if self.orientation >= 5 else (top, left, height, width)


FLIPPED = {1: (3, 4, 7, 8), 2: (2, 3, 6, 7)}  # dimension -> EXIF orientations; from 5 on they are transposed before


def apply_orientation(pixels: torch.Tensor, orientation: int) -> torch.Tensor:
    """uint8 [C, H, W], as stored -> as it is to be seen, in memory as decoders lay it out; `orientation`: EXIF's."""
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.transpose(1, 2)
    pixels = pixels.flip([dimension for dimension, which in FLIPPED.items() if orientation in which])
    return pixels.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def _orientation(image: Image.Image, data: bytes) -> int:
    """EXIF's orientation of an image that is opened, 1 to 8; 1, as it is, if there is none that can be read."""
    if image.format == "TIFF":  # whose reader turns it
        return 1
    if image.format == "PNG" and "exif" not in image.info:
        if not any(chunk in data for chunk in (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")):
            return 1  # getexif() would decode the pixels to look behind them
        image.load()
    found = 1
    with contextlib.suppress(Exception):  # odd metadata are no reason to refuse an image
        found = image.getexif().get(0x0112, 1)
    return found if found in range(1, 9) else 1


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


def bytes_to_tensor(file: bytes) -> torch.Tensor:
    """Its bytes, uint8 [n]; a copy, for tensors may be written to."""
    return torch.frombuffer(bytearray(file), dtype=torch.uint8)


def _decode_jpeg(data: bytes, channels: int) -> torch.Tensor | None:
    """With torchvision, faster than PIL and to the same pixels; None if it fails: PIL has the last word."""
    try:
        from torchvision.io import ImageReadMode, decode_jpeg

        mode = ImageReadMode.GRAY if channels == 1 else ImageReadMode.RGB
        pixels: torch.Tensor = decode_jpeg(bytes_to_tensor(data), mode=mode)
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
    return _as_tensor(np.array(image.convert("L" if channels == 1 else "RGB")))


def _as_tensor(pixels: npt.NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None]).permute(2, 0, 1)
