"""Image files of a data set, and faults to plant in it. Files only: nothing of the program."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

SPLITS = {"train": 12, "val": 3, "test": 3}
"""Images of a class."""


def scene(number: int, width: int = 96, height: int = 80) -> Image.Image:
    """A picture with shapes and colours of its own, as a photograph has them."""
    random = np.random.default_rng(number)
    coarse = Image.fromarray(random.integers(0, 256, (7, 9, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def clean(root: Path) -> Path:
    """Write 36 JPEG files of two classes."""
    number = 0
    for split, count in SPLITS.items():
        for name in ("cat", "dog"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for each in range(count):
                number += 1
                scene(number, 90 + number, 80).save(folder / f"{each}.jpg", quality=92)
    return root


def jpeg(image: Image.Image, quality: int = 92, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, **options)
    return file.getvalue()


def box(brand: bytes) -> bytes:
    """The beginning of an ISO media file."""
    return b"\0\0\0\x18ftyp" + brand + b"\0\0\0\0" + brand + b"mif1" + bytes(200)


def plant(root: Path) -> None:
    """Write a file with each fault into a clean data set."""
    cat, dog = root / "train/cat", root / "train/dog"
    first = scene(1, 91, 80)  # train/cat/0.jpg
    (cat / "empty.jpg").write_bytes(b"")
    (cat / "cut.jpg").write_bytes(jpeg(scene(500))[:-400])
    (cat / "text.jpg").write_text("no image at all")
    (cat / "page.jpg").write_text("<!DOCTYPE html><html><body>404</body></html>")
    (cat / "phone.jpg").write_bytes(box(b"heic"))
    (dog / "web.jpg").write_bytes(box(b"avif"))
    (dog / "new.jpg").write_bytes(b"\xff\x0a" + bytes(100))
    (dog / "first_again.jpg").write_bytes((cat / "0.jpg").read_bytes())  # another label
    with Image.open(root / "test/dog/0.jpg") as image:
        image.save(root / "train/dog/seen.png")  # another split, as another file
    (root / "train/cat/1_copy.jpg").write_bytes((cat / "1.jpg").read_bytes())
    (root / "val/cat/smaller.jpg").write_bytes(jpeg(scene(3, 93, 80).resize((60, 52)), 40))  # like train/cat/2.jpg
    for split in SPLITS:
        (root / split / "fish").mkdir()
        (root / split / "owl").mkdir()
    scene(505).save(root / "train/owl/0.jpg")
    (dog / "raw.cr2").write_bytes(b"raw")
    assert first.size == (91, 80)
