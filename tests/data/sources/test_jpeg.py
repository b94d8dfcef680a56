"""JPEG files decoded without Pillow: the same pixels, the same bounds, and Pillow wherever something is unusual."""

import io
import struct
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from accel_train.data.sources import images
from accel_train.data.sources.images import ImageError, LazyImage, decode, decode_jpeg, plain_jpeg

SIZES = [(1, 1), (2, 3), (7, 7), (8, 5), (17, 16), (31, 33), (64, 48), (101, 67), (240, 181)]  # width, height
JFIF = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00"

pytestmark = pytest.mark.skipif(images.simplejpeg is None, reason="simplejpeg has no wheel for this platform")


def picture(size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    """Noise on a gradient, so that each coefficient of a JPEG is used."""
    width, height = size
    generator = np.random.default_rng(width * height)
    down, across = np.mgrid[0:height, 0:width]
    smooth = np.stack([255 * down / height, 255 * across / width, 128 + 0 * down], -1)
    noisy = np.clip(smooth + generator.normal(size=smooth.shape, scale=25), 0, 255).astype(np.uint8)
    return Image.fromarray(noisy).convert(mode)


def encoded(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def variants() -> Iterator[tuple[str, bytes]]:
    """Files of all kinds that simplejpeg is to decode, with their names."""
    for size in SIZES:
        for quality in (30, 75, 95):
            for subsampling in ("4:4:4", "4:2:2", "4:2:0"):
                for progressive in (False, True):
                    name = f"{size} {quality} {subsampling} {progressive}"
                    options = {"quality": quality, "subsampling": subsampling, "progressive": progressive}
                    yield name, encoded(picture(size), **options)
            yield f"{size} {quality} grey", encoded(picture(size, "L"), quality=quality)
        yield (
            f"{size} optimized, with a profile and a comment",
            encoded(picture(size), optimize=True, icc_profile=bytes(70_000), comment=b"a comment"),
        )
        yield f"{size} restart markers", encoded(picture(size), restart_marker_blocks=1)
        yield f"{size} stored as RGB", encoded(picture(size), keep_rgb=True)


def pillows(data: bytes, mode: str) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.array(image.convert(mode))


class TestPixels:
    def test_are_pillows_and_the_size_is_known(self) -> None:
        for name, data in variants():
            with Image.open(io.BytesIO(data)) as image:
                mode, (width, height) = image.mode, image.size
            assert plain_jpeg(data) == (height, width, len(mode)), name
            found = decode_jpeg(data, height, width, 3)
            assert found is not None and np.array_equal(found, pillows(data, "RGB")), name
            assert torch.equal(decode(data, 3), torch.from_numpy(found).permute(2, 0, 1)), name

    def test_of_one_channel_are_the_luminance_as_pillow_decodes_it(self) -> None:
        for name, data in variants():
            with Image.open(io.BytesIO(data)) as image:
                image.draft("L", None)
                luminance = np.array(image.convert("L"))
            assert np.array_equal(decode(data, 1)[0].numpy(), luminance), name

    @pytest.mark.parametrize("reduction", [2, 4, 8])
    def test_at_a_smaller_scale_are_those_of_pillows_draft(self, reduction: int) -> None:
        for name, data in variants():
            with Image.open(io.BytesIO(data)) as image:
                width, height = image.size
                if min(width, height) < reduction:
                    continue
                image.draft(None, (width // reduction, height // reduction))
                expected = np.array(image)
            if expected.ndim == 2:
                expected = expected[..., None]
            found = decode_jpeg(data, height, width, expected.shape[2], reduction)
            if max(width, height) < images.LEAST_REDUCED:
                assert found is None
            else:
                assert found is not None and np.array_equal(found, expected), name

    @pytest.mark.parametrize("channels", [1, 3])
    def test_are_the_same_without_simplejpeg(self, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also of a part that is decoded smaller, of files that EXIF turns, and of those that have only one channel."""
        exif = Image.Exif()
        exif[0x0112] = 6
        files = [*dict(variants()).values(), encoded(picture((101, 67)), exif=exif)]

        def all_pixels() -> list[torch.Tensor]:
            found = []
            for data in files:
                image = LazyImage(data, channels)
                assert image.reducible
                found.append(image.pixels())
                if min(image.width, image.height) > 16:
                    box = (3, 2, image.height - 5, image.width - 7)
                    found += [LazyImage(data, channels).reduced(box, 9, 8, reduction) for reduction in (2, 4)]
            return found

        with_it = all_pixels()
        monkeypatch.setattr(images, "simplejpeg", None)
        for one, other in zip(with_it, all_pixels(), strict=True):
            assert torch.equal(one, other)


def mpo() -> bytes:
    file = io.BytesIO()
    picture((40, 30)).save(file, "MPO", save_all=True, append_images=[picture((40, 30), "L").convert("RGB")])
    return file.getvalue()


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(picture((40, 30)), exif=exif)


UNUSUAL = {
    "four channels": lambda: encoded(picture((40, 30), "CMYK")),
    "EXIF": lambda: turned(6),
    "XMP, which can have an orientation": lambda: encoded(picture((40, 30)), xmp=b"<x/>"),
    "further pictures": mpo,
    "no JPEG": lambda: b"\x89PNG\r\n\x1a\n" + bytes(40),
    "nothing after the start": lambda: b"\xff\xd8",
    "padding between the segments": lambda: JFIF + b"\xff" + encoded(picture((40, 30)))[20:],
    "no scan": lambda: JFIF,
}


class TestPillowDecides:
    @pytest.mark.parametrize("kind", UNUSUAL)
    def test_about_what_is_unusual(self, kind: str) -> None:
        data = UNUSUAL[kind]()
        assert plain_jpeg(data) is None
        try:
            with Image.open(io.BytesIO(data)) as image:
                expected = np.array(ImageOps.exif_transpose(image).convert("RGB"))
        except (OSError, SyntaxError):
            with pytest.raises(ImageError):
                decode(data, 3)
        else:
            assert np.array_equal(decode(data, 3).permute(1, 2, 0).numpy(), expected)

    @pytest.mark.parametrize("field", ["bits", "height", "width", "channels", "twice", "lossless"])
    def test_about_an_unusual_frame(self, field: str) -> None:
        usual = struct.pack(">HHBHHB", 0xFFC0, 17, 8, 30, 40, 3) + bytes(9)
        scan = struct.pack(">HH", 0xFFDA, 12) + bytes(10)
        changed = {
            "bits": usual[:4] + b"\x0c" + usual[5:],
            "height": usual[:5] + bytes(2) + usual[7:],
            "width": usual[:7] + bytes(2) + usual[9:],
            "channels": usual[:9] + b"\x04" + usual[10:],
            "twice": usual + usual,
            "lossless": b"\xff\xc3" + usual[2:],
        }
        assert plain_jpeg(JFIF + usual + scan) == (30, 40, 3)
        assert plain_jpeg(JFIF + changed[field] + scan) is None

    def test_about_a_file_that_simplejpeg_refuses(self) -> None:
        """Bytes between two segments of the scans: libjpeg only warns of them, and Pillow reads the file."""
        data = encoded(picture((40, 30)))
        odd = data[:-2] + b"\x00\x00\x00" + data[-2:]
        assert plain_jpeg(odd) == (30, 40, 3)
        assert decode_jpeg(odd, 30, 40, 3) is None
        for channels in (1, 3):
            assert torch.equal(decode(odd, channels), decode(data, channels))
        assert torch.equal(
            LazyImage(odd, 3).reduced((0, 0, 30, 40), 10, 12, 2), LazyImage(data, 3).reduced((0, 0, 30, 40), 10, 12, 2)
        )


class TestDamage:
    def test_a_truncated_file_is_an_error_at_each_scale(self) -> None:
        for progressive in (False, True):
            data = encoded(picture((101, 67)), progressive=progressive)
            for end in range(0, len(data), 7):
                for reduction in (1, 2, 8):
                    with pytest.raises(ImageError):
                        image = LazyImage(data[:end], 3)
                        _ = image.pixels() if reduction == 1 else image.reduced((0, 0, 67, 101), 5, 5, reduction)

    def test_changed_bytes_are_an_error_or_what_pillow_reads(self) -> None:
        """Of random bytes in headers and data. Nothing but ImageError is raised, and nothing warns."""
        generator = np.random.default_rng(0)
        data = encoded(picture((48, 40)))
        read = 0
        for _ in range(400):
            damaged = bytearray(data)
            for position in generator.integers(2, len(data), generator.integers(1, 4)):
                damaged[position] = generator.integers(256)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                try:
                    found = decode(bytes(damaged), 3)
                except ImageError:
                    continue
            read += 1
            assert np.array_equal(found.permute(1, 2, 0).numpy(), _upright(bytes(damaged)))
        assert read

    def test_a_file_that_simplejpeg_cannot_read_names_pillows_reason(self) -> None:
        data = encoded(picture((48, 40)))
        with pytest.raises(ImageError, match="truncated"):
            decode(data[: len(data) // 2], 3)


def _upright(data: bytes) -> np.ndarray:
    with warnings.catch_warnings(), Image.open(io.BytesIO(data)) as image:
        warnings.simplefilter("ignore")
        return np.array(ImageOps.exif_transpose(image).convert("RGB"))


class TestSizes:
    def test_the_limit_holds_before_anything_is_unpacked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = encoded(picture((40, 30)))
        monkeypatch.setattr(images, "decode_jpeg", None)  # would fail if it was called
        monkeypatch.setattr(images, "MAX_PIXELS", 1199)
        with pytest.raises(ImageError, match=r"it has 1,200 pixels, more than 1,199"):
            LazyImage(data, 3)
        monkeypatch.setattr(images, "MAX_PIXELS", 1200)
        assert LazyImage(data, 3).width == 40

    def test_an_announced_size_is_not_believed(self) -> None:
        """The header says 60,000 x 60,000 pixels."""
        data = encoded(picture((40, 30)))
        position = data.index(b"\xff\xc0") + 5
        huge = data[:position] + struct.pack(">HH", 60_000, 60_000) + data[position + 4 :]
        with pytest.raises(ImageError, match=r"3,600,000,000 pixels"):
            decode(huge, 3)

    def test_a_plain_file_is_not_opened_by_pillow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = encoded(picture((240, 181)))
        expected = [decode(data, 3), LazyImage(data, 3).reduced((0, 0, 181, 240), 20, 20, 4)]
        monkeypatch.setattr(Image, "open", None)
        image = LazyImage(data, 3)
        assert torch.equal(image.pixels(), expected[0])
        assert torch.equal(image.reduced((0, 0, 181, 240), 20, 20, 4), expected[1])
