"""Image files of all formats, also damaged ones, are found and decoded."""

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from accel_train.config.schema import Data
from accel_train.data.sources.folder import FileImages, find_images
from accel_train.data.sources.images import MAX_PIXELS, ImageError, decode, to_tensor
from accel_train.data.sources.index import SplitFiles, StringArray
from accel_train.errors import UserError


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def smooth(height: int = 40, width: int = 60) -> np.ndarray:
    """Return smooth pixels, uint8 [h, w, 3], which JPEG changes little."""
    down, across = np.mgrid[0:height, 0:width]
    return np.stack([2 * down, 2 * across, 100 + down], -1).astype(np.uint8)


@pytest.mark.parametrize("format", ["PNG", "BMP", "PPM", "TIFF", "WEBP"])
def test_rgb_in_every_format(format: str) -> None:
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(Image.fromarray(smooth()), format, **options)
    assert torch.equal(decode(data, 3), torch.from_numpy(smooth()).permute(2, 0, 1))


@pytest.mark.parametrize(
    ("mode", "format"),
    [
        *((mode, "PNG") for mode in ("1", "L", "LA", "P", "RGB", "RGBA")),
        *(("P", "GIF"), ("RGB", "JPEG2000"), ("RGB", "AVIF"), ("RGBA", "WEBP"), ("L", "JPEG"), ("CMYK", "JPEG")),
        *(("CMYK", "TIFF"), ("YCbCr", "JPEG"), ("YCbCr", "TIFF")),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(1, 1), (5, 3)])
def test_every_mode_becomes_what_was_asked_for(mode: str, format: str, channels: int, size: tuple[int, int]) -> None:
    """From a file and from a PIL image, as those of a user's Dataset and of LoadedRun.transform."""
    image = Image.new("RGB", size, (200, 200, 200)).convert(mode)
    data = encoded(image, format)
    pixels = decode(data, channels)
    assert torch.equal(to_tensor(Image.open(io.BytesIO(data)), channels), pixels)
    assert pixels.shape == (channels, size[1], size[0]) and pixels.dtype == torch.uint8
    if mode != "1":
        assert (pixels.float() - 200).abs().max() <= 6
    else:
        assert set(pixels.unique().tolist()) <= {0, 255}


def test_a_palette_with_transparency_warns_nobody() -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels = decode(encoded(image, transparency=b"\x00\x80"), 3)
    assert pixels[:, 0, 0].tolist() == [10, 20, 30]


def test_a_bmp_called_jpg_is_read_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "cat.jpg").write_bytes(encoded(Image.fromarray(smooth()), "BMP"))
    source = FileImages(tmp_path, SplitFiles(StringArray(["cat.jpg"]), torch.tensor([0])), Data())
    assert torch.equal(source.fetch([0])[0], torch.from_numpy(smooth()).permute(2, 0, 1))


def test_a_truncated_image_is_an_error_wherever_it_ends() -> None:
    jpeg, png = (encoded(Image.fromarray(smooth()), format) for format in ("JPEG", "PNG"))
    for end in range(len(jpeg)):
        with pytest.raises(ImageError):
            decode(jpeg[:end], 3)
    refused = 0
    for end in range(0, len(png), 3):
        try:
            assert torch.equal(decode(png[:end], 3), decode(png, 3))  # only a checksum is missing
        except ImageError:
            refused += 1
    assert refused >= (len(png) - 30) // 3


@pytest.mark.parametrize("data", [b"", b"not an image at all", b"\xff\xd8\xff\xe0" + bytes(100), b"GIF89a"])
def test_rubbish_is_an_error(data: bytes) -> None:
    with pytest.raises(ImageError):
        decode(data, 3)


def test_no_image_starts_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow gives PostScript to Ghostscript, whatever the file is called."""
    marker, program = tmp_path / "was-run", tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {marker}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # it remembers that there was none
    with pytest.raises(ImageError) as raised:
        decode(encoded(Image.fromarray(smooth()), "EPS"), 3)
    assert not marker.exists()
    assert "PostScript" in str(raised.value)


def test_an_unreadable_file_is_named_with_reason_and_advice(tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").touch()
    files = SplitFiles(StringArray(["empty.jpg", "gone.jpg"]), torch.tensor([0, 1]))
    source = FileImages(tmp_path, files, Data(name="x"))
    with pytest.raises(UserError) as caught:
        source.fetch([0])
    assert str(tmp_path / "empty.jpg") in str(caught.value) and "the file is empty" in str(caught.value)
    assert "accel-train check-data x" in str(caught.value) and "--data.skip-unreadable" in str(caught.value)
    assert not caught.value.every_process
    with pytest.raises(UserError, match=r"gone\.jpg cannot be read: No such file"):
        source.fetch([1])


def test_finding_leaves_out_rubbish_and_hidden_files(tmp_path: Path) -> None:
    for path in (
        "a/1.JPG",
        "a/Thumbs.db",
        "a/.hidden.jpg",
        "b/deep/2.png",
        ".git/3.png",
        "b/notes.txt",
        "b/._4.jpg",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    found = find_images(tmp_path)
    assert (found.images, found.folders) == (["a/1.JPG", "b/deep/2.png"], ["a", "b", "b/deep"])
    assert found.others == {".db": 1, ".txt": 1}


def test_links_are_followed_and_one_in_a_circle_is_refused(tmp_path: Path) -> None:
    for path in ("data/a/1.png", "data/b/2.png", "far/deep/3.png"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    root = tmp_path / "data"
    (root / "0").symlink_to("a")  # comes before what it leads to
    (root / "c").symlink_to(tmp_path / "far" / "deep")  # a class that lies elsewhere
    (root / "a" / "gone").symlink_to("nowhere")
    (root / "a" / "itself").symlink_to("itself")
    found = find_images(root)
    assert found.images == ["0/1.png", "a/1.png", "b/2.png", "c/3.png"] and found.folders == ["0", "a", "b", "c"]
    (tmp_path / "other").symlink_to(root)  # the root itself may be a link
    assert find_images(tmp_path / "other") == found
    for link, target in (("a/round", ".."), ("b/up", tmp_path), ("c/back", root)):
        (root / link).symlink_to(target)
        with pytest.raises(UserError, match="is a link to a folder that it is in: remove it"):
            find_images(root)
        (root / link).unlink()


def test_the_limit_is_pillows_also_of_a_picture_inside_an_icon(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Image.MAX_IMAGE_PIXELS is not None and MAX_PIXELS == 2 * Image.MAX_IMAGE_PIXELS
    inner, file = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (300, 300)).save(inner, "PNG")
    Image.new("RGB", (16, 16)).save(file, "ICO", sizes=[(16, 16)])
    icon = file.getvalue()[:14] + len(inner.getvalue()).to_bytes(4, "little") + (22).to_bytes(4, "little")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5_000)
    with pytest.raises(ImageError, match=r"90000 pixels"):
        decode(icon + inner.getvalue(), 3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 45_000)
    assert decode(icon + inner.getvalue(), 3).shape[0] == 3
