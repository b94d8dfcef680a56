"""Small shards for the tests of data on a storage."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

TRAIN, PER_SHARD = 6, 16


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def write_shards(folder: Path, *, train: int = TRAIN, side: int = 12) -> Path:
    """Write WebDataset shards train-000.tar, … and val-000.tar of noise, in two classes; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(0)
    for split, count in (("train", train), ("val", 1)):
        for shard in range(count):
            with tarfile.open(folder / f"{split}-{shard:03d}.tar", "w") as archive:
                for number in range(PER_SHARD):
                    image = io.BytesIO()
                    pixels = numbers.integers(0, 256, (side, side, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(image, "PNG")
                    add(archive, f"{shard:03d}{number:04d}.png", image.getvalue())
                    add(archive, f"{shard:03d}{number:04d}.cls", str(number % 2).encode())
    return folder


def size_of(folder: Path, pattern: str = "*.tar") -> int:
    """Bytes of the shards in the folder."""
    return sum(path.stat().st_size for path in folder.glob(pattern))
