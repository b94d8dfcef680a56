"""Images of more than 8 bits, of several pages, and animations are refused."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from accel_train.config.schema import Data
from accel_train.data.sources.images import ImageError, LazyImage, decode, to_tensor
from accel_train.data.sources.load import load_splits
from accel_train.data.sources.splits import Splits
from accel_train.errors import UserError
from accel_train.user_code import GIVEN, provided

RAMP = np.linspace(0, 1, 256).reshape(16, 16)
LEVELS = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)


def encoded(values: np.ndarray, format: str = "TIFF", **options: Any) -> bytes:
    return in_memory(Image.fromarray(values), format, **options)


def in_memory(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def png(values: np.ndarray) -> bytes:
    """A PNG of 16 bits with colours, [H, W, 2 to 4], which Pillow does not write."""
    height, width, channels = values.shape

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 16, {2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)


def tiff(values: np.ndarray, kind: int, channels: int = 1) -> bytes:
    """A TIFF of integers with (2) or without (1) a sign, of 8 or 16 bits a channel."""
    content, bits = values.tobytes(), 8 * values.dtype.itemsize
    end = 8 + 2 + 12 * 10 + 4
    tags = [
        (256, 3, 1, values.shape[1]), (257, 3, 1, values.shape[0]), (258, 3, channels, bits if channels == 1 else end),
        (259, 3, 1, 1), (262, 3, 1, 1 if channels == 1 else 2), (273, 4, 1, end + 8), (277, 3, 1, channels),
        (278, 3, 1, values.shape[0]), (279, 4, 1, len(content)), (339, 3, 1, kind),
    ]  # fmt: skip
    directory = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\0\x08\0\0\0\x0a\0" + directory + bytes(4) + struct.pack("<3Hxx", bits, bits, bits) + content


def deep() -> list[bytes]:
    """Files of floats, of integers with 16 or 32 bits, with a sign, and of 16 bits in each of several channels."""
    values = (RAMP * 4095).round()
    files = [encoded(RAMP.astype(np.float32)), encoded(values.astype(np.int32))]
    files += [encoded(values.astype(np.uint16), format) for format in ("TIFF", "PNG")]
    files += [tiff((RAMP * 100 - 50).astype(dtype), 2) for dtype in (np.int8, np.int16)]
    files += [png(np.repeat(values[..., None], channels, 2)) for channels in (2, 3, 4)]  # first grey and transparent
    return [*files, tiff(np.repeat(values[..., None], 3, 2).astype(np.uint16), 1, channels=3)]


@pytest.mark.parametrize("data", deep())
def test_more_than_8_bits_are_refused_with_advice(data: bytes) -> None:
    """They were black squares."""
    advice = r"nothing says which value is black.*8 bits a channel, or return float tensors from a Dataset"
    with pytest.raises(ImageError, match=advice):
        LazyImage(data, 1)  # before its pixels are decoded
    with pytest.raises(ImageError, match=advice):
        to_tensor(Image.open(io.BytesIO(data)), 3)  # of a user's own Dataset


def test_unsigned_tiffs_of_8_bits_are_read() -> None:
    assert torch.equal(decode(tiff((RAMP * 255).round().astype(np.uint8), 1), 1), LEVELS)


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
def test_a_tiff_of_several_pages_is_refused(compression: str) -> None:
    first = Image.fromarray((RAMP * 255).round().astype(np.uint8))
    for others in ([], [Image.new("L", (8, 8)), Image.new("L", (4, 4))]):
        data = in_memory(first, "TIFF", compression=compression, save_all=True, append_images=others)
        if others:
            with pytest.raises(ImageError, match="it has 3 pictures, as a TIFF of several pages"):
                decode(data, 1)
        else:
            assert torch.equal(decode(data, 1), LEVELS)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "AVIF"])
def test_an_animation_is_refused(format: str) -> None:
    first, second = (Image.new("RGB", (16, 16), (shade, shade, shade)) for shade in (200, 10))
    for others in ([], [second], [second, first]):
        file = io.BytesIO()
        first.save(file, format, save_all=True, append_images=others)
        if others:
            with pytest.raises(ImageError, match=f"it has {1 + len(others)} pictures"):
                decode(file.getvalue(), 3)
        else:
            assert (decode(file.getvalue(), 3).int() - 200).abs().max() <= 3


class Pictures(list[Any]):
    """A user's Dataset of two classes in turn."""

    classes, targets = ("a", "b"), (0, 1)

    def __init__(self, *images: Any) -> None:
        super().__init__(zip(images, self.targets, strict=True))


def splits_of(*images: Any) -> Splits:
    with provided({"data.name": {"train": Pictures(*images)}}):
        return load_splits(Data(name=GIVEN["data.name"][0], channels=1), 0)


def test_pil_images_of_a_users_dataset_are_treated_alike() -> None:
    images = [Image.fromarray((RAMP * 4095).round().astype("u2"))] * 2
    with pytest.raises(UserError, match=r"train sample 0 cannot be read: its pixels have more than 8 bits"):
        splits_of(*images)


def test_images_of_a_users_dataset_are_all_of_one_kind() -> None:
    """A later float tensor among images of 8 bits trained as a black picture, and a uint8 one among floats as white."""
    picture, levels = Image.new("L", (8, 8), 200), torch.full((1, 8, 8), 200, dtype=torch.uint8)
    floats, colours = torch.full((1, 8, 8), 0.8), levels.expand(3, -1, -1)
    for first, later in ((picture, floats), (levels, floats), (floats, levels), (floats, picture), (picture, colours)):
        train = splits_of(first, later).train
        train.fetch([0])
        with pytest.raises(UserError, match=r"train sample 1 is .*, but the first one"):
            train.fetch([1])


def test_a_dataset_of_a_hub_has_the_pixels_of_its_files(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    grey = Image.new("L", (16, 16), 100)
    exif = Image.Exif()
    exif[0x0112] = 6
    pictures = {
        "grey": in_memory(grey, "PNG"),
        "sideways": in_memory(Image.linear_gradient("L").resize((16, 16)), "JPEG", exif=exif),
        "pages": in_memory(grey, "TIFF", save_all=True, append_images=[grey]),
        "animation": in_memory(grey, "GIF", save_all=True, append_images=[Image.new("L", (16, 16), 9)]),
    }
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})

    def load(*names: str) -> Any:
        rows = {"image": [{"bytes": pictures[name], "path": None} for name in names], "label": [0, 1, 0][: len(names)]}
        folder = tmp_path / "-".join(names)
        folder.mkdir()
        datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "train.parquet")
        data = Data(name=f"hfds/{folder}", root=tmp_path / "cache")
        return load_splits(data, 0).train.fetch(range(len(names)))

    for name, pixels in zip(("grey", "sideways"), load("grey", "sideways"), strict=True):
        assert torch.equal(pixels, decode(pictures[name], 3)), name
    for name in ("pages", "animation"):
        with pytest.raises(UserError, match="train image 1 cannot be read: it has 2 pictures"):
            load("grey", name)
