"""Images of all of Pillow's modes have the same pixels from every source and for predict, or are refused everywhere."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from accel_train.api import load_run
from accel_train.cli import main
from accel_train.config.schema import Data
from accel_train.data.sources.load import load_splits
from accel_train.data.sources.splits import Source
from accel_train.errors import UserError
from accel_train.tools.load_run import LoadedRun

GREY = np.linspace(0, 255, 24 * 24).round().astype(np.uint8).reshape(24, 24)
COLOURS = np.stack([GREY, GREY[::-1], GREY.T], 2)


def transparent_palette() -> Image.Image:
    image = Image.fromarray(COLOURS).quantize(16)
    image.info["transparency"] = 3
    return image


def with_alpha(image: Image.Image) -> Image.Image:
    image.putalpha(Image.fromarray(GREY.T.copy()))
    return image


IMAGES = {  # mode and kind of file
    "1.png": Image.fromarray(GREY).convert("1"),
    "L.png": Image.fromarray(GREY),
    "L.jpg": Image.fromarray(GREY),
    "LA.png": with_alpha(Image.fromarray(GREY)),
    "P.png": transparent_palette(),
    "P.gif": transparent_palette(),
    "RGB.jp2": Image.fromarray(COLOURS),
    "RGB.avif": Image.fromarray(COLOURS),
    "RGBA.png": with_alpha(Image.fromarray(COLOURS)),
    "RGBA.webp": with_alpha(Image.fromarray(COLOURS)),
    "CMYK.jpg": Image.fromarray(COLOURS).convert("CMYK"),
    "CMYK.tif": Image.fromarray(COLOURS).convert("CMYK"),
    "YCbCr.jpg": Image.fromarray(COLOURS).convert("YCbCr"),
    "YCbCr.tif": Image.fromarray(COLOURS).convert("YCbCr"),
    "LAB.tif": Image.frombytes("LAB", (24, 24), COLOURS.tobytes()),
    "I;16.png": Image.fromarray(GREY.astype(np.uint16) * 16),
    "I;16.tif": Image.fromarray(GREY.astype(np.uint16) * 16),
    "I;16B.tif": Image.frombytes("I;16B", (24, 24), (GREY.astype(np.uint16) * 16).astype(">u2").tobytes()),
    "I.tif": Image.fromarray(GREY.astype(np.int32) * 16),
    "F.tif": Image.fromarray(GREY.astype(np.float32) * 16),
}
RANGES = (None, (0.0, 4095.0))
REFUSED = {None: {"I;16.png", "I;16.tif", "I;16B.tif", "I.tif", "F.tif"}, RANGES[1]: set()}
"""Because nothing says which value is white."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, object], Path]:
    """Runs with 1 and 3 channels, without and with a range."""
    folder = tmp_path_factory.mktemp("runs")
    for kind in "ab":
        (folder / "data" / kind).mkdir(parents=True)
        Image.fromarray(GREY).save(folder / "data" / kind / "1.png")
    runs: dict[tuple[int, object], Path] = {}
    for channels in (1, 3):
        for number, value_range in enumerate(RANGES):
            runs[channels, value_range] = folder / f"{channels}-{number}"
            words = f"train digits --data.name folder --data.root {folder}/data --data.channels {channels} --epochs 1"
            words += f" --model.image-size 24 --batch-size 2 --data.workers 0 --output-dir {folder}/{channels}-{number}"
            words += "" if value_range is None else " --data.range 0 4095"
            assert main(words.split()) == 0
    return runs


def pixels(source: Source, id: int) -> torch.Tensor | None:
    try:
        return source.fetch([id])[0]
    except UserError as error:
        assert "cannot be read" in str(error)
        return None


def predicted(run: LoadedRun, image: Path | Image.Image) -> torch.Tensor | None:
    try:
        return run.transform(image)
    except UserError as error:
        assert "cannot be read" in str(error)
        return None


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("value_range", RANGES)
def test_all_modes_have_the_same_pixels_everywhere(
    tmp_path: Path, runs: dict[tuple[int, object], Path], channels: int, value_range: tuple[float, float] | None
) -> None:
    root = tmp_path / "images"
    for kind in "ab":
        (root / kind).mkdir(parents=True)
        for name, image in IMAGES.items():
            image.save(root / kind / name)
    rows = [f"{kind}/{name},{kind}\n" for kind in "ab" for name in IMAGES]
    (root / "labels.csv").write_text("path,label\n" + "".join(rows))
    with tarfile.open(tmp_path / "images.tar", "w") as archive:
        for kind in "ab":
            archive.add(root / kind, kind)
    places = {"folder": root, "csv": root / "labels.csv", "tar": tmp_path / "images.tar"}
    sources = {
        name: load_splits(Data(name, place, channels=channels, range=value_range), 0).train
        for name, place in places.items()
    }
    names = [sources["folder"].name(id).removeprefix(f"{root}/") for id in range(len(sources["folder"]))]
    found = {name: pixels(sources["folder"], id) for id, name in enumerate(names)}
    refused = {name.partition("/")[2] for name, image in found.items() if image is None}
    assert refused - {"LAB.tif"} == REFUSED[value_range]  # older versions of Pillow cannot convert it
    for kind in ("csv", "tar"):
        for id, name in enumerate(names):
            other, image = pixels(sources[kind], id), found[name]
            assert (other is None) == (image is None), (kind, name)
            assert other is None or torch.equal(other, image), (kind, name)

    of_range = [] if value_range is None else ["--data.range", "0", "4095"]
    words = [
        "shards",
        "folder",
        str(tmp_path / "out"),
        "--data.root",
        str(root),
        "--encoding",
        "raw",
        "--processes",
        "1",
    ]
    words += ["--data.channels", str(channels), *of_range]
    if refused:
        listed = str(tmp_path / "list")
        assert main(["check-data", "folder", "--data.root", str(root), "--output", listed, *of_range]) == 1
        words += ["--data.skip-unreadable", listed]
    assert main(words) == 0
    stored = load_splits(Data("wds", tmp_path / "out", channels=channels), 0).train
    kept = [name for name in names if found[name] is not None]
    assert len(stored) == len(kept)
    for id, name in enumerate(kept):
        assert torch.equal(stored.fetch([id])[0], found[name]), name  # type: ignore[arg-type]

    run = load_run(runs[channels, value_range])
    for name, image in found.items():
        expected = None if image is None else run.transform(image)
        for given in (root / name, Image.open(root / name)):
            other = predicted(run, given)
            assert (other is None) == (expected is None), name
            assert other is None or torch.equal(other, expected), (name, given)
