"""Images of more than 8 bits have the same pixels, or are refused, from whatever source they come."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from accel_train.config.schema import Data
from accel_train.data.sources.files.images import decode
from accel_train.data.sources.load import load_splits
from accel_train.errors import UserError

RANGE = (0.0, 4095.0)


def in_memory(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def test_images_of_a_users_dataset_are_all_of_one_kind(tmp_path: Path) -> None:
    """A later float tensor among images of 8 bits trained as a black picture, and a uint8 one among floats as white."""
    for number, (first, later) in enumerate(
        (
            ("Image.new('L', (8, 8), 200)", "torch.full((1, 8, 8), 0.8)"),
            ("torch.full((1, 8, 8), 200, dtype=torch.uint8)", "torch.full((1, 8, 8), 0.8)"),
            ("torch.full((1, 8, 8), 0.8)", "torch.full((1, 8, 8), 200, dtype=torch.uint8)"),
            ("torch.full((1, 8, 8), 0.8)", "Image.new('L', (8, 8), 200)"),
            ("Image.new('L', (8, 8), 200)", "torch.full((3, 8, 8), 200, dtype=torch.uint8)"),
        )
    ):
        file = tmp_path / f"mine{number}.py"
        file.write_text(
            "import torch\nfrom PIL import Image\n\n"
            "class Pictures(list):\n    classes, targets = ['a', 'b'], [0, 1]\n\n"
            f"def data():\n    return {{'train': Pictures([({first}, 0), ({later}, 1)])}}\n"
        )
        train = load_splits(Data(name=f"{file}:data", channels=1), 0).train
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
        data = Data(name=f"hfds/{folder}", root=tmp_path / "cache", range=RANGE)
        return load_splits(data, 0).train.fetch(range(len(names)))

    for name, pixels in zip(("deep", "float", "sideways"), load("deep", "float", "sideways"), strict=True):
        assert torch.equal(pixels, decode(pictures[name], 3, value_range=RANGE)), name
    for name, message in (("pages", "a TIFF of 2 pages"), ("animation", "an animation of 2 pictures")):
        with pytest.raises(UserError, match=f"train image 1 cannot be read: .*{message}"):
            load("deep", name)
