"""preprocess.json: Pillow and NumPy prepare an image file as evaluation does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from prepared import prepare
from torch import Tensor

from accel_train.config.schema import Augment
from accel_train.data.batch_transform import crop_fraction
from accel_train.data.sources.images import decode
from accel_train.records.model_info import ModelInfo
from accel_train.task import SEVERAL_LABELS
from accel_train.tools.export import rules_of
from accel_train.tools.load_run import Preprocessing


def info_of(size: int, native: int | None, channels: int = 3) -> ModelInfo:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return ModelInfo(("a", "b"), channels, size, native, mean[:channels], std[:channels])


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth noise: a shift by a pixel or a missing antialiasing changes it by much more than rounding does."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    smooth = Image.fromarray(noise).resize((max(width // 3, 1), max(height // 3, 1)), Image.Resampling.BOX)
    return smooth.resize((width, height), Image.Resampling.BICUBIC)


def levels_apart(file: Path, info: ModelInfo, augment: Augment) -> Tensor:
    """How far the pixels of both ways are apart, of 255."""
    preprocessing = Preprocessing(info, augment)
    wanted = preprocessing.to_input(preprocessing.resize(decode(file.read_bytes(), info.channels)))[0]
    ours = torch.from_numpy(prepare(file, rules_of(info, augment)).copy())
    assert ours.shape == wanted.shape == (info.channels, info.image_size, info.image_size)
    return (ours - wanted).abs() * torch.tensor(info.std)[:, None, None] * 255


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("native", "resize", "size"),
    [
        *[(None, resize, size) for resize, size in ((None, 64), (64, 64), (67, 64), (96, 61), (41, 40))],
        *[(native, None, native) for native in (8, 28)],
        *[(32, resize, 64) for resize in (None, 65, 67, 69)],
        *[(32, resize, size) for resize, size in ((40, 32), (32, 29), (35, 32))],
    ],
)
def test_the_pixels_are_those_of_evaluation(
    native: int | None, resize: int | None, size: int, interpolation: str, tmp_path: Path
) -> None:
    augment = Augment(resize=resize, interpolation=interpolation)  # type: ignore[arg-type]
    for number, (width, height) in enumerate([(100, 75), (75, 101), (33, 200), (64, 64), (40, 30), (32, 32), (8, 8)]):
        file = tmp_path / f"{number}.png"
        picture(width, height, number).save(file)
        apart = levels_apart(file, info_of(size, native), augment)
        limit = 2.01 if interpolation == "bicubic" else 1.01
        assert apart.max() <= (limit if native is None else 2.6), (width, height)
        assert apart.mean() <= 0.5, (width, height)


@pytest.mark.parametrize(("native", "size", "side"), [(None, 64, 67), (None, 61, 64), (32, 64, 67), (28, 28, 29)])
def test_a_crop_fraction_is_that_of_the_input(native: int | None, size: int, side: int, tmp_path: Path) -> None:
    picture(100, 75).save(tmp_path / "one.png")
    augment, info = Augment(crop_fraction=0.95), info_of(size, native)
    assert rules_of(info, augment) == rules_of(info, Augment(resize=side))
    assert levels_apart(tmp_path / "one.png", info, augment).mean() <= 0.5


def test_a_fraction_is_as_short_as_it_can_be() -> None:
    assert [crop_fraction(224, side) for side in (224, 232, 235, 256)] == [1.0, 0.9655, 0.95, 0.875]
    for size in (1, 7, 31, 224, 288):
        for side in range(size, 2 * size + 2):
            assert Augment(crop_fraction=crop_fraction(size, side)).in_evaluation(size) == Augment(resize=side)


@pytest.mark.parametrize("channels", [1, 3])
def test_files_of_any_kind(channels: int, tmp_path: Path) -> None:
    image = picture(90, 60)
    turned = Image.Exif()
    turned[0x0112] = 6
    image.save(tmp_path / "plain.jpg", quality=90)
    image.save(tmp_path / "turned.jpg", quality=90, exif=turned)
    image.convert("CMYK").save(tmp_path / "cmyk.jpg", quality=90)
    image.convert("L").save(tmp_path / "grey.jpg", quality=90)
    image.convert("LA").save(tmp_path / "la.png")
    image.convert("RGBA").save(tmp_path / "rgba.png")
    image.convert("P").save(tmp_path / "palette.png")
    image.save(tmp_path / "some.webp")
    files = sorted(tmp_path.iterdir())
    assert len(files) == 8
    for file in files:
        apart = levels_apart(file, info_of(48, None, channels), Augment())
        assert apart.max() <= 2.01, file.name  # a grey JPEG has its own luminance
        assert apart.mean() <= 0.6, file.name


def test_what_the_file_says() -> None:
    rules = rules_of(info_of(224, None), Augment())
    assert rules["steps"] == [{"resize": 256, "crop": 224}]
    assert (rules["mode"], rules["interpolation"], rules["probabilities"]) == ("RGB", "bilinear", "softmax")
    assert rules_of(info_of(28, 28, 1), Augment())["steps"] == [{"resize": 28, "crop": 28}]
    several = ModelInfo(("a", "b"), 2, 8, 8, (0.5, 0.5), (0.5, 0.5), full_scale=1, task=SEVERAL_LABELS)
    rules = rules_of(several, Augment())
    assert (rules["mode"], rules["steps"], rules["full_scale"], rules["probabilities"]) == (None, None, 1, "sigmoid")
