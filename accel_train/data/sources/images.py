"""Strict decoding of images: a damaged image is an error, never half grey and never replaced by another one."""

from __future__ import annotations

import contextlib
import io
import shlex
import struct
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from accel_train.config.schema import Data
from accel_train.errors import UserError
from accel_train.files import TooLargeError, read_regular_file

try:
    import simplejpeg
except ImportError:  # there are no wheels for some platforms
    simplejpeg = None

if TYPE_CHECKING:
    from PIL import Image

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def default_mean_std(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Default mean and standard deviation of each channel: ImageNet's, or their mean for grey images."""
    if channels == 1:
        return (0.449,), (0.226,)
    return IMAGENET_MEAN, IMAGENET_STD


MAX_PIXELS = 178_956_970
"""Pillow refuses larger images as "decompression bombs", also inside a file such as an icon."""


Box = tuple[int, int, int, int]
"""Top, left, height and width, in pixels."""


def decode(data: bytes, channels: int) -> torch.Tensor:
    """The image in `data`, as uint8 [channels, H, W]; see `LazyImage`. Raises ImageError."""
    return LazyImage(data, channels).pixels()


class LazyImage:
    """An encoded image whose size is known before its pixels are decoded.

    The content, not the file's name, determines the format. `height`, `width` and pixels follow the EXIF orientation.
    What has more than 8 bits (`check_depth`) or several pictures (`check_pages`) is refused. Transparency is dropped,
    as in torchvision's ImageFolder.
    """

    reducible = False
    """Whether the image can be decoded at a smaller scale: an RGB or grey JPEG, not CMYK."""

    def __init__(self, data: bytes, channels: int) -> None:
        """channels: 3 (RGB) or 1 (grey). Raises ImageError."""
        if not data:
            raise ImageError("the file is empty")
        self.data, self.channels = data, channels
        self.image: Image.Image | None = None
        self.orientation = 1
        if (plain := plain_jpeg(data)) is not None:
            self.stored_height, self.stored_width, self.stored_channels = plain
            self.reducible = True
            self._check_size()
        else:
            self._check(self._opened())
        turned = self.orientation >= 5
        self.height = self.stored_width if turned else self.stored_height
        self.width = self.stored_height if turned else self.stored_width

    def _opened(self) -> Image.Image:
        """The image, opened by Pillow. Raises ImageError."""
        from PIL import Image

        if self.image is None:
            with _strictly():
                self.image = Image.open(io.BytesIO(self.data))
        return self.image

    def _check(self, image: Image.Image) -> None:
        """Find the size and the orientation of an image that is not a plain JPEG. Raises ImageError."""
        if image.format == "EPS":  # Pillow would start Ghostscript, whose time and memory nobody bounds
            raise ImageError("it is PostScript, which is a program and not an image; convert it to PNG")
        self.stored_width, self.stored_height = image.size
        self._check_size()
        with _strictly():
            check_pages(image)
            check_depth(image)
            self.orientation = _orientation(image, self.data)
        self.reducible = image.format == "JPEG" and image.mode in ("RGB", "L")
        self.stored_channels = 1 if image.mode == "L" else 3

    def _check_size(self) -> None:
        if self.stored_width * self.stored_height > MAX_PIXELS:
            raise ImageError(
                f"it has {self.stored_width * self.stored_height:,} pixels, more than {MAX_PIXELS:,}: a malicious file "
                "could fill the memory; cut it into parts"
            )

    def pixels(self) -> torch.Tensor:
        """The pixels, uint8 [channels, H, W]. Raises ImageError."""
        decoded = self._decode_jpeg(self.channels) if self.reducible else None
        if decoded is not None:
            return apply_orientation(_as_tensor(decoded), self.orientation)
        with _strictly(), self._opened() as image:
            if self.reducible and self.channels == 1:
                image.draft("L", None)  # the luminance, which simplejpeg gives, too
            return apply_orientation(to_tensor(image, self.channels), self.orientation)

    def reduced(
        self, box: Box, height: int, width: int, reduction: int, interpolation: str = "bilinear"
    ) -> torch.Tensor:
        """The box of a `reducible` image, resized to uint8 [channels, height, width]. Raises ImageError.

        To save work, the JPEG is decoded `reduction` (2, 4 or 8) times smaller: the decoder skips high frequencies.
        The pixels are deterministic, but differ slightly from those of the full image.
        """
        from PIL import Image

        top, left, high, wide = self._stored(box)
        if self.orientation >= 5:
            height, width = width, height
        decoded = self._decode_jpeg(self.stored_channels, reduction)
        if decoded is not None:
            whole = Image.fromarray(decoded if self.stored_channels == 3 else decoded[..., 0])
        else:
            with _strictly(), self._opened() as whole:
                whole.draft(None, (whole.width // reduction, whole.height // reduction))
                whole.load()
        mode = "L" if self.channels == 1 else "RGB"
        if whole.mode != mode:
            whole = whole.convert(mode)
        corners = (left / reduction, top / reduction, (left + wide) / reduction, (top + high) / reduction)
        resized = np.array(whole.resize((width, height), Image.Resampling[interpolation.upper()], box=corners))
        return apply_orientation(_as_tensor(resized), self.orientation)

    def _decode_jpeg(self, channels: int, reduction: int = 1) -> npt.NDArray[np.uint8] | None:
        return decode_jpeg(self.data, self.stored_height, self.stored_width, channels, reduction)

    def _stored(self, box: Box) -> Box:
        """The box in the stored image, before the EXIF orientation is applied."""
        top, left, height, width = box
        if self.orientation in FLIPPED[2]:
            left = self.width - left - width
        if self.orientation in FLIPPED[1]:
            top = self.height - top - height
        return (left, top, width, height) if self.orientation >= 5 else (top, left, height, width)


FLIPPED = {1: (3, 4, 7, 8), 2: (2, 3, 6, 7)}  # dimension -> EXIF orientations that flip it; 5 to 8 transpose first


def apply_orientation(pixels: torch.Tensor, orientation: int) -> torch.Tensor:
    """The upright image, channels last in memory like a decoder's output. `pixels`: uint8 [C, H, W], as stored."""
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.transpose(1, 2)
    pixels = pixels.flip([dimension for dimension, which in FLIPPED.items() if orientation in which])
    return pixels.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def _orientation(image: Image.Image, data: bytes) -> int:
    """EXIF orientation of an opened image, 1 to 8; 1 (upright) if there is none or it cannot be read."""
    if image.format == "TIFF":  # its reader applies the orientation
        return 1
    if image.format == "PNG" and "exif" not in image.info:
        if not any(chunk in data for chunk in (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")):
            return 1  # getexif() would decode the pixels to search after them
        image.load()
    orientation = 1
    with contextlib.suppress(Exception):  # invalid metadata is no reason to refuse an image
        orientation = image.getexif().get(0x0112, 1)
    return orientation if orientation in range(1, 9) else 1


@contextlib.contextmanager
def _strictly() -> Iterator[None]:
    """Convert every error of an image decoder into an ImageError."""
    from PIL import UnidentifiedImageError

    with warnings.catch_warnings():
        # PIL warns of invalid metadata, which does not matter here, and of half the number of pixels that it refuses.
        warnings.simplefilter("ignore")
        try:
            yield
        except UnidentifiedImageError:
            raise ImageError("it is not an image of a known format") from None
        except MemoryError:
            raise
        except Exception as error:  # PIL's readers raise nearly anything on damaged data: SyntaxError, struct.error, …
            raise ImageError(str(error).rstrip(".") or type(error).__name__) from error


def to_tensor(image: Image.Image, channels: int) -> torch.Tensor:
    """The pixels decoded by PIL, uint8 [channels, H, W]. Raises ImageError for more than 8 bits."""
    check_depth(image)
    if image.mode in ("P", "PA"):  # a palette may contain transparent colours
        image = image.convert("RGBA")
    if image.mode not in ("1", "L", "LA"):
        image = image.convert("RGB")
    return _as_tensor(np.array(image.convert("L" if channels == 1 else "RGB")))


def to_image(pixels: torch.Tensor) -> Image.Image:
    """Pixels, uint8 [C, H, W] of 1 or 3 channels, as an image of PIL."""
    from PIL import Image

    return Image.fromarray(pixels.permute(1, 2, 0).squeeze(-1).contiguous().numpy())


def _as_tensor(pixels: npt.NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None]).permute(2, 0, 1)


# Images of more than 8 bits, and of several pictures: they are refused.
#
# Nothing in most files says which value is white, and any guess makes the images of some data sets black.


BITS_PER_SAMPLE, SAMPLE_FORMAT = 258, 339  # tags of TIFF
SIGNED = 2  # SAMPLE_FORMAT of integers


class ImageError(ValueError):
    """An image cannot be decoded; the text says why."""


def check_depth(image: Image.Image) -> None:
    """Raise ImageError if an opened image has more than 8 bits a channel, or signed integers. Reads its header alone.

    Of a PNG that is loaded already, Pillow does not say any more that its colours had 16 bits.
    """
    stored = [str(part[3]) for part in getattr(image, "tile", ())]  # of a PNG such as RGB;16B, until it is loaded
    is_deep = image.mode == "F" or image.mode.startswith("I") or _tag(image, BITS_PER_SAMPLE) == 16
    is_deep |= image.format == "PNG" and any("16" in mode for mode in stored)
    if is_deep or _tag(image, SAMPLE_FORMAT) == SIGNED:
        raise ImageError(
            "its pixels have more than 8 bits or are signed, and nothing says which value is black and which is white: "
            "save it with 8 bits a channel, or return float tensors from a Dataset of your own (docs/own.md)"
        )


def check_pages(image: Image.Image) -> None:
    """Raise ImageError if an opened file has several pages, or is an animation: which picture is the sample?

    The further pictures in a camera's JPEG (MPO) do not count.
    """
    pictures = getattr(image, "n_frames", 1)
    if pictures > 1 and image.format != "MPO":
        raise ImageError(
            f"it has {pictures} pictures, as a TIFF of several pages or an animation, but a sample is one image: save "
            "the picture that you mean as a file of its own"
        )


def _tag(image: Image.Image, number: int) -> int:
    """A tag of the TIFF's current page, of its first channel; 0 if there is none."""
    value = getattr(image, "tag_v2", {}).get(number, 0)
    return int(value[0] if isinstance(value, tuple) else value)


# JPEG files without Pillow: the size of a plain one from its first markers, and pixels by simplejpeg (libjpeg-turbo).
#
# The pixels are Pillow's, and at a smaller scale those of its `draft`, in a fraction of the time for small images.
# Where simplejpeg is not installed, or refuses a file, Pillow decodes it.


START = b"\xff\xd8"
FRAMES = (0xFFC0, 0xFFC1, 0xFFC2)
"""Of a baseline, an extended and a progressive JPEG. Others (lossless, arithmetic coding) are Pillow's to decide."""
SCAN = 0xFFDA
IGNORED = {0xFFC4, 0xFFDB, 0xFFDD, 0xFFE0, *range(0xFFE2, 0xFFF0), 0xFFFE}
"""Tables, comments, profiles. Not 0xFFE1, which has the EXIF orientation."""
PROFILE = 0xFFE2
FURTHER_PICTURES = b"MPF\0"
"""How a profile begins that lists further pictures in the file."""
SEGMENT, FRAME = struct.Struct(">HH"), struct.Struct(">BHHB")
LEAST_REDUCED = 8
"""Below this size, several scales give the same number of pixels, and simplejpeg does not say which one it takes."""


def plain_jpeg(data: bytes) -> tuple[int, int, int] | None:
    """Height, width and number of channels of a JPEG of 1 or 3 channels of 8 bits that has no orientation and no
    further pictures. None: it is none, or something about its beginning is unusual."""
    if not data.startswith(START):
        return None
    size: tuple[int, int, int] | None = None
    position = len(START)
    try:
        while True:
            marker, length = SEGMENT.unpack_from(data, position)
            if marker == SCAN:
                return size
            if marker in FRAMES:
                bits, height, width, channels = FRAME.unpack_from(data, position + SEGMENT.size)
                if size is not None or bits != 8 or channels not in (1, 3) or not height * width:
                    return None
                size = height, width, channels
            elif marker not in IGNORED or (
                marker == PROFILE and data.startswith(FURTHER_PICTURES, position + SEGMENT.size)
            ):
                return None
            position += 2 + length  # the two bytes of the length count
    except struct.error:  # the data end before the scan
        return None


def decode_jpeg(
    data: bytes, height: int, width: int, channels: int, reduction: int = 1
) -> npt.NDArray[np.uint8] | None:
    """The pixels, uint8 [H, W, channels], as stored: of a grey image, or the luminance, if `channels` is 1.

    `height`, `width`: those of the whole image; with a `reduction` of 2, 4 or 8 the result is as many times smaller,
    rounded up. None if simplejpeg is not installed, or refuses the data.
    """
    if simplejpeg is None or (reduction > 1 and max(height, width) < LEAST_REDUCED):
        return None
    height, width = -(-height // reduction), -(-width // reduction)
    try:
        # With `strict`, its default, what libjpeg warns of is an error, such as data that end too early.
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(
            data, "RGB" if channels == 3 else "GRAY", min_height=height, min_width=width
        )
    except ValueError:
        return None
    return pixels if pixels.shape == (height, width, channels) else None


# Sources of encoded images (JPEG, PNG, …), decoded when they are fetched.


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
