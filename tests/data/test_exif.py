"""Photographs with an EXIF orientation are turned upright in each path to the model."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from accel_train.config.schema import Augment, Config, Data
from accel_train.data.loading import create_input_pipeline
from accel_train.data.order import EvaluationSampler, Plan, TrainingSampler
from accel_train.data.sources.images import LazyImage, decode
from accel_train.data.sources.load import load_splits
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.environment import Launch
from accel_train.tools.shards import write_shards

ORIENTATIONS = range(1, 9)
BACK = {  # what a camera does to the upright image for the viewer to undo: EXIF's definition, by Pillow's names
    1: None, 2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE", 6: "ROTATE_90", 7: "TRANSVERSE", 8: "ROTATE_270",
}  # fmt: skip


def upright(number: int = 0) -> Image.Image:
    coarse = np.random.default_rng(number).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((61, 44), Image.Resampling.BICUBIC)


def stored(image: Image.Image, orientation: int, format: str, **options: Any) -> bytes:
    """Return a file whose pixels are `image` after its EXIF orientation is applied."""
    how = BACK[orientation]
    turned = image if how is None else image.transpose(Image.Transpose[how])
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    turned.save(file, format, exif=exif, **options)
    return file.getvalue()


def tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def exif_at_the_end(png: bytes) -> bytes:
    """Put the eXIf chunk after the pixels, which the PNG format allows."""
    at = png.index(b"eXIf") - 4
    (length,) = struct.unpack(">I", png[at : at + 4])
    chunk = png[at : at + 12 + length]
    assert zlib.crc32(chunk[4:-4]) == struct.unpack(">I", chunk[-4:])[0]
    rest = png[:at] + png[at + 12 + length :]
    end = rest.rindex(b"IEND") - 4
    return rest[:end] + chunk + rest[end:]


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_decoded_upright_from_every_format(orientation: int) -> None:
    expected = tensor(upright())
    lossless = {
        "PNG": stored(upright(), orientation, "PNG"),
        "its end": exif_at_the_end(stored(upright(), orientation, "PNG")),
        "TIFF": stored(upright(), orientation, "TIFF"),
        "WebP": stored(upright(), orientation, "WEBP", lossless=True),
    }
    for name, data in lossless.items():
        picture = LazyImage(data, 3)
        assert (picture.height, picture.width) == (44, 61), name
        assert torch.equal(picture.pixels(), expected), name
    jpeg = stored(upright(), orientation, "JPEG", quality=95)
    picture = LazyImage(jpeg, 3)
    assert (picture.height, picture.width) == (44, 61)
    assert torch.equal(picture.pixels(), tensor(ImageOps.exif_transpose(Image.open(io.BytesIO(jpeg)))))
    grey = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(jpeg)).convert("L")))
    assert (decode(jpeg, 1)[0].float() - torch.from_numpy(grey)).abs().max() <= 3  # another rounding


@pytest.mark.parametrize("exif", [b"", b"Exif\0\0junk", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", bytes(50)])
def test_odd_metadata_are_no_reason_to_refuse_an_image(exif: bytes) -> None:
    file = io.BytesIO()
    upright().save(file, "JPEG", exif=exif)
    assert decode(file.getvalue(), 3).shape == (3, 44, 61)
    for value in (0, 9, 300):
        strange = Image.Exif()
        strange[0x0112] = value
        upright().save(file := io.BytesIO(), "PNG", exif=strange)
        assert torch.equal(decode(file.getvalue(), 3), tensor(upright()))


@pytest.fixture(scope="module", params=["PNG", "JPEG"])
def trees(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write the same images twice: with EXIF orientations, and as upright pixels."""
    base = tmp_path_factory.mktemp("exif")
    for number in range(16):
        place = Path("train" if number < 8 else "test") / "ab"[number % 2]
        data = stored(upright(number), 1 + number % 8, request.param)
        for tree in ("stored", "upright"):
            (base / tree / place).mkdir(parents=True, exist_ok=True)
        (base / "stored" / place / f"{number}.png").write_bytes(data)  # whatever it is called
        Image.fromarray(decode(data, 3).permute(1, 2, 0).numpy()).save(base / "upright" / place / f"{number}.png")
    return base / "stored", base / "upright"


def seen(data: Data, augment: Augment, *, training: bool) -> torch.Tensor:
    """Return the model's input, by sample number."""
    splits = load_splits(data, 0)
    source = splits.train if training else splits.test
    assert source is not None
    order = TrainingSampler(Plan(len(source), 8, 1, 1), 0) if training else EvaluationSampler(len(source), 8)
    config = Config(data=data, augment=augment, batch_size=8)
    feed = create_input_pipeline(
        config, splits, source, order, create_accelerator(Launch()), training=training, size=40
    )
    (batch,) = feed.batches
    return batch["images"][batch["ids"].argsort()]


WAYS = [
    (Augment(crop="resized", flip=0.5), True),
    (Augment(crop="random"), True),
    (Augment(resize=40), False),
    (Augment(resize=50), False),
]


@pytest.mark.parametrize(("augment", "training"), WAYS)
@pytest.mark.parametrize("way", ["folder", "copy", "raw", "jpeg"])
def test_every_way_to_the_model(
    trees: tuple[Path, Path], tmp_path: Path, way: str, augment: Augment, training: bool
) -> None:
    found = []
    for root in trees:
        data = Data(name="folder", root=root, workers=0)
        if way != "folder":
            encoding: Literal["raw", "jpeg"] = "raw" if way == "raw" else "jpeg"
            write_shards(data, tmp_path / root.name, short_side=42, encoding=encoding, keep_order=True, processes=1)
            data = Data(name="wds", root=tmp_path / root.name, workers=0)
        found.append(seen(data, augment, training=training))
    assert torch.equal(*found)
