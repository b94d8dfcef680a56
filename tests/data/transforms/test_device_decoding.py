"""Decoding on the device gives the same pixels as decoding in workers; here the device is the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from accel_train.cli import main
from accel_train.config.schema import Augment, Config, Data
from accel_train.data.loading import create_input_pipeline
from accel_train.data.order.plan import Plan
from accel_train.data.order.samplers import EvaluationSampler, TrainingSampler
from accel_train.data.sources.load import load_splits
from accel_train.data.sources.splits import Source
from accel_train.errors import UserError
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.environment import Launch

KINDS = ("RGB.jpg", "L.jpg", "CMYK.jpg", "RGB.png", "RGB.bmp.jpg")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    numbers = np.random.default_rng(0)
    for number in range(20):
        mode, *_, ending = (kind := KINDS[number % len(KINDS)]).split(".")
        height, width = numbers.integers(34, 64, 2)  # workers decode larger JPEG at a smaller size
        coarse = Image.fromarray(numbers.integers(0, 256, (6, 5, 3), dtype=np.uint8))
        path = root / "train" / str(number % 2) / f"{number}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = coarse.resize((int(width), int(height)), Image.Resampling.BICUBIC).convert(mode)
        image.save(path, format="BMP" if "bmp" in kind else None)
    return root


def images(source: Source, data: Data, augment: Augment, *, training: bool, channels: int) -> torch.Tensor:
    """Return the images of an input pipeline, in the order of the samples: uint8 [n, C, size, size]."""
    config = Config(data=data, augment=augment, batch_size=8)
    splits = load_splits(data, 0)
    order = TrainingSampler(Plan(len(source), 8, 1, 1), 0) if training else EvaluationSampler(len(source), 8)
    feed = create_input_pipeline(
        config, splits, source, order, create_accelerator(Launch()), training=training, size=32
    )
    found = {}
    for batch in feed.batches:
        assert batch["images"].shape[1:] == (channels, 32, 32)
        assert batch["images"].is_contiguous(memory_format=torch.channels_last)
        found.update(zip(batch["ids"].tolist(), batch["images"], strict=True))
    return torch.stack([found[id] for id in sorted(found)])


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("augment", "training"),
    [
        (Augment(crop="resized", flip=0.5), True),
        (Augment(flip=0.5), True),
        (Augment(crop="resized", policy="randaugment"), False),
        (Augment(resize=32), False),
    ],
    ids=["resized", "center", "evaluation", "evaluation of the whole"],
)
def test_the_same_pixels(tree: Path, augment: Augment, training: bool, workers: int, channels: int) -> None:
    data = Data(name="folder", root=tree, workers=workers, channels=channels)
    source = load_splits(data, 0).train
    on_host = images(source, data, augment, training=training, channels=channels)
    on_device = images(
        source,
        Data(name="folder", root=tree, workers=workers, channels=channels, decode_on="device"),
        augment,
        training=training,
        channels=channels,
    )
    assert len(on_host) == 20
    assert torch.equal(on_host, on_device)


def damaged(root: Path, how: str) -> Path:
    numbers = np.random.default_rng(0)
    for number in range(12):
        path = root / "train" / str(number % 2) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(numbers.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(path)
    data = path.read_bytes()
    # Without its tables a decoder fails; the header and the end are as they should be.
    path.write_bytes(data[: len(data) // 2] if how == "cut short" else data.replace(b"\xff\xdb", b"\xff\xfe"))
    return path


@pytest.mark.parametrize("how", ["cut short", "without tables"])
def test_a_damaged_file_is_named(tmp_path: Path, how: str) -> None:
    path = damaged(tmp_path, how)
    data = Data(name="folder", root=tmp_path, workers=0, decode_on="device")
    source = load_splits(data, 0).train
    with pytest.raises(UserError, match=rf"{path} cannot be read: .*`accel-train check-data folder"):
        images(source, data, Augment(crop="resized"), training=True, channels=3)


@pytest.mark.parametrize(
    ("data", "augment", "message"),
    [
        (Data(decode_on="device"), Augment(), "the images of this dataset are not files; use host"),
        (None, Augment(crop="random"), "augment.policy and crop=random transform decoded images on the host"),
        (None, Augment(crop="resized", policy="randaugment"), "augment.policy and crop=random transform decoded"),
    ],
)
def test_what_it_cannot_do_is_said(tree: Path, data: Data | None, augment: Augment, message: str) -> None:
    data = data or Data(name="folder", root=tree, decode_on="device")
    source = load_splits(data, 0).train
    with pytest.raises(UserError, match=rf"--data\.decode-on device: {message}"):
        images(source, data, augment, training=True, channels=3)


def test_a_run(tree: Path, tmp_path: Path) -> None:
    """A run gives the same model and the same evaluation as with decoding in workers."""
    words = f"""
        --data.name folder --data.root {tree} --data.test-fraction 0.2 --batch-size 8 --epochs 2
        --model.image-size 32 --augment.crop resized
    """.split()
    found = []
    for place in ("host", "device"):
        run = tmp_path / place
        assert main(["train", "digits", *words, "--data.decode-on", place, "--output-dir", str(run)]) == 0
        result = json.loads((run / "result.json").read_text())
        found.append((result["test_loss"], result["train_images"]))
    assert found[0] == found[1]
