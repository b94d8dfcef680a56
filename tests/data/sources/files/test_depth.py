"""Images of more than 8 bits: refused without a range, scaled with one."""

from __future__ import annotations

import io
import itertools
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
import torch
from PIL import Image

from accel_train.api import load_run
from accel_train.cli import main
from accel_train.config.schema import Data
from accel_train.data.sources.files.images import MAX_PIXELS, ImageError, LazyImage, decode, to_tensor
from accel_train.data.sources.load import load_splits
from accel_train.data.sources.splits import Splits
from accel_train.errors import UserError
from accel_train.user_code.reference import GIVEN, provided

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


@pytest.mark.parametrize(
    "values",
    [RAMP.astype(np.float32), (RAMP * 255).round().astype(np.int32), (RAMP * 4095).round().astype(np.uint16)],
)
def test_what_has_no_range_is_refused_with_advice(values: np.ndarray) -> None:
    """They were black squares."""
    with pytest.raises(ImageError, match=r"nothing says which value is black.*--data.range LOW HIGH"):
        LazyImage(encoded(values), 1)  # before its pixels are decoded


def test_signed_integers_are_refused_and_the_way_out_works() -> None:
    for dtype in (np.int8, np.int16):
        values = (RAMP * 100 - 50).astype(dtype)
        for value_range in (None, (-50, 50)):
            with pytest.raises(ImageError, match=r"signed integers, .* or grey with floating-point numbers"):
                decode(tiff(values, 2), 1, MAX_PIXELS, value_range)
        pixels = decode(encoded(values.astype(np.float32)), 1, MAX_PIXELS, (-50, 50))
        assert (pixels.int() - LEVELS.int()).abs().max() <= 3  # 101 levels
    assert torch.equal(decode(tiff((RAMP * 255).round().astype(np.uint8), 1), 1), LEVELS)


@pytest.mark.parametrize(
    ("data", "value_range"),
    [
        (encoded(RAMP.astype(np.float32)), (0, 1)),
        (encoded((RAMP * 0.4 + 0.3).astype(np.float32)), (0.3, 0.7)),  # which float32 does not have exactly
        (encoded((RAMP * 510 - 255).round().astype(np.int32)), (-255, 255)),
        (encoded((RAMP * 4095).round().astype(np.uint16)), (0, 4095)),
        (encoded((RAMP * 4095).round().astype(np.uint16), "PNG"), (0, 4095)),
    ],
)
def test_values_are_scaled_by_the_range(data: bytes, value_range: tuple[float, float]) -> None:
    assert torch.equal(decode(data, 1, MAX_PIXELS, value_range), LEVELS)
    assert torch.equal(decode(data, 3, MAX_PIXELS, value_range), LEVELS.expand(3, -1, -1))


@pytest.mark.parametrize("value", [-0.1, 1.5, np.nan, np.inf])
def test_a_value_outside_the_range_is_named(value: float) -> None:
    values = RAMP.astype(np.float32)
    values[3, 3] = value
    with pytest.raises(ImageError, match=rf"it has the value {value}\d*, outside --data.range 0 1"):
        decode(encoded(values), 1, MAX_PIXELS, (0, 1))


def test_images_with_a_range_of_their_own_keep_it() -> None:
    eight, pgm = encoded((RAMP * 255).round().astype(np.uint8), "PNG"), b"P5 16 16 4095\n"
    pgm += (RAMP * 4095).round().astype(">u2").tobytes()
    for data in (eight, pgm):
        assert torch.equal(decode(data, 1, MAX_PIXELS, (0, 31)), decode(data, 1))
    assert (decode(pgm, 1).int() - LEVELS.int()).abs().max() <= 1
    jpeg = encoded((RAMP * 255).round().astype(np.uint8), "JPEG")
    assert torch.equal(decode(jpeg, 3, MAX_PIXELS, (0, 31)), decode(jpeg, 3))


def test_colours_of_16_bits_are_refused() -> None:
    values = (RAMP * 4095).round()[..., None]
    files = [png(np.repeat(values, channels, 2)) for channels in (2, 3, 4)]  # the first one is grey, and transparent
    files.append(tiff(np.repeat(values, 3, 2).astype(np.uint16), 1, channels=3))
    for data, value_range in itertools.product(files, (None, (0, 4095))):
        with pytest.raises(ImageError, match="16 bits in each of several channels: save it with 8 bits a channel"):
            LazyImage(data, 3, MAX_PIXELS, value_range)
        with pytest.raises(ImageError, match="16 bits in each of several channels"):
            to_tensor(Image.open(io.BytesIO(data)), 3, value_range)  # of a user's own Dataset


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


def write(root: Path, kind: str, counts: dict[str, int]) -> Path:
    """Dark and light pictures, stored with other numbers."""
    numbers = np.random.default_rng(0)
    for split, count in counts.items():
        for number in range(count):
            path = root / split / ("dark", "light")[number % 2] / f"{number}.{'tif' if kind == 'float' else 'png'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            values = numbers.uniform(0, 0.4, (8, 8)) + 0.5 * (number % 2)
            values[0, 0] = 0.9
            as_stored = values.astype(np.float32) if kind == "float" else (values * 4095).round().astype(np.uint16)
            Image.fromarray(as_stored).save(path)
    return root


def test_check_data_knows_the_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write(tmp_path / "12", "12 bits", {"train": 4, "test": 2})
    listed = tmp_path / "list"
    check = ["check-data", "folder", "--data.root", str(root), "--output", str(listed), "--processes", "1"]
    assert main(check) == 1
    assert "nothing says which value is black" in capsys.readouterr().out
    assert main([*check, "--data.range", "0", "4095"]) == 0
    assert main([*check, "--data.range", "0", "1000"]) == 1
    assert "outside --data.range 0 1000" in capsys.readouterr().out
    assert main([*check, "--data.range", "5", "1"]) == 2
    assert "--data.range: expected two numbers, the first one smaller, found '5 1'" in capsys.readouterr().err


def test_a_range_for_data_that_has_none_is_refused() -> None:
    with pytest.raises(UserError, match=r"--data.range 0 1: .*'digits' have 8 or are tensors; remove it"):
        load_splits(Data(name="digits", range=(0, 1)), 0)


class Pictures(list[Any]):
    """A user's Dataset of two classes in turn."""

    classes, targets = ("a", "b"), (0, 1)

    def __init__(self, *images: Any) -> None:
        super().__init__(zip(images, self.targets, strict=True))


def splits_of(*images: Any, **options: Any) -> Splits:
    with provided({"data.name": {"train": Pictures(*images)}}):
        return load_splits(Data(name=GIVEN["data.name"][0], channels=1, **options), 0)


def test_pil_images_of_a_users_dataset_are_treated_alike() -> None:
    for values, value_range in (
        (RAMP.astype("f4"), (0, 1)),
        ((RAMP * 255).round().astype("i4"), (0, 255)),
        ((RAMP * 4095).round().astype("u2"), (0, 4095)),
    ):
        images = [Image.fromarray(values)] * 2
        with pytest.raises(UserError, match=r"train sample 0 cannot be read: its pixels have .*--data\.range"):
            splits_of(*images)
        splits = splits_of(*images, range=value_range)
        assert splits.notes == () and splits.value_range == value_range
        assert torch.equal(splits.train.fetch([1])[0], LEVELS)


@pytest.mark.ci
def test_a_run_keeps_its_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training, evaluation and prediction have the same pixels. Without the range the accuracy was 50 %."""
    root = write(tmp_path / "float", "float", {"train": 64, "test": 16})
    words = ["digits", "--data.name", "folder", "--data.root", root, "--data.channels", 1, "--model.image-size", 8,
             "--batch-size", 8, "--epochs", 2, "--data.workers", 0, "--output-dir", tmp_path / "run"]  # fmt: skip
    refused = helpers.run(*words)
    assert refused.returncode == 2 and "--data.range LOW HIGH" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    done = helpers.run(*words, "--data.range", 0, 1)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/result.json").read_text())["test_accuracy"] == 1

    run = load_run(tmp_path / "run")
    images = sorted((root / "test").rglob("*.tif"))
    assert [found.classes[0] for found in run.predict(images)] == [image.parent.name for image in images]
    assert torch.equal(run.transform(images[0]), run.transform(Image.open(images[0])))
    bright = np.asarray(Image.open(images[0])) + 1
    with pytest.raises(UserError, match=r"outside --data\.range 0 1"):
        run.transform(Image.fromarray(bright))


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
        "deep": in_memory(Image.fromarray(np.linspace(0, 4095, 256).astype(np.uint16).reshape(16, 16)), "PNG"),
        "float": in_memory(Image.fromarray(np.linspace(0, 4095, 256, dtype=np.float32).reshape(16, 16)), "TIFF"),
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
        data = Data(name=f"hfds/{folder}", root=tmp_path / "cache", range=(0.0, 4095.0))
        return load_splits(data, 0).train.fetch(range(len(names)))

    for name, pixels in zip(("deep", "float", "sideways"), load("deep", "float", "sideways"), strict=True):
        assert torch.equal(pixels, decode(pictures[name], 3, value_range=(0.0, 4095.0))), name
    for name in ("pages", "animation"):
        with pytest.raises(UserError, match="train image 1 cannot be read: it has 2 pictures"):
            load("deep", name)
