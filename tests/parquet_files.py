"""Small data sets in Parquet files as the hub keeps them, written by Hugging Face's `datasets`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from PIL import Image
from shard_files import PER_SHARD, TRAIN

datasets.disable_progress_bars()
CLASSES = ["cat", "dog"]


def images(count: int, *, side: int = 12, seed: int = 0) -> list[bytes]:
    """So many PNG files of noise."""
    numbers, files = np.random.default_rng(seed), []
    for _ in range(count):
        file = io.BytesIO()
        Image.fromarray(numbers.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file, "PNG")
        files.append(file.getvalue())
    return files


def table(contents: list[bytes], **columns: Any) -> datasets.Dataset:
    """A data set of these images with the classes cat and dog in turn, and other columns."""
    labels = [number % 2 for number in range(len(contents))]
    paths = [{"bytes": content, "path": f"{number}.png"} for number, content in enumerate(contents)]
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)}
    made = datasets.Dataset.from_dict({"image": paths, "label": labels}, datasets.Features(features))
    for name, values in columns.items():
        made = made.add_column(name, values)
    return made


def write_hub(
    folder: Path, *, train: int = TRAIN, val: int = 1, per_shard: int = PER_SHARD, side: int = 12, below: str = "data"
) -> Path:
    """Write data/train-00000-of-00006.parquet, … and data/validation-…; return the folder."""
    (folder / below).mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate((("train", train), ("validation", val))):
        whole = table(images(count * per_shard, side=side, seed=seed))
        for shard in range(count):
            part = whole.shard(count, shard, contiguous=True)
            part.to_parquet(folder / below / f"{split}-{shard:05d}-of-{count:05d}.parquet", batch_size=5)
    return folder
