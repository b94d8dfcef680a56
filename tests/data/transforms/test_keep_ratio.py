"""timm's crops rkrc and rkrr, compared with its own code, which here draws what a key gives."""

from __future__ import annotations

import io

import numpy as np
import pytest
import timm.data.transforms
import torch
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from accel_train.config.schema import Augment
from accel_train.data.sources.files.images import LazyImage
from accel_train.data.transforms.image import ImageTransform
from accel_train.data.transforms.keep_ratio import STREAMS
from accel_train.keyed import hashed, key, uniforms

NUMBERS = torch.Generator().manual_seed(0)
SHAPES = [(3, 40, 40), (3, 31, 57), (3, 64, 33), (3, 20, 90), (1, 24, 24), (3, 130, 77)] * 8
IMAGES = [torch.randint(256, shape, generator=NUMBERS, dtype=torch.uint8) for shape in SHAPES]
KEYS = hashed(key(1, 0, "augment"), torch.arange(len(IMAGES)))


class Drawn:
    """Python's `random` with the numbers of one key, in the order in which timm asks for them."""

    def __init__(self, word: Tensor) -> None:
        scaled, scale, stretched, stretch, top, left = uniforms(word[None], STREAMS).double()[:, 0].tolist()
        self.chances, self.numbers = iter([(scaled, scale), (stretched, stretch)]), iter([top, left])

    def random(self) -> float:
        chance, self.next = next(self.chances)
        return chance

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.next

    def randint(self, low: int, high: int) -> int:
        return low + int(next(self.numbers) * (high - low + 1))


@pytest.mark.parametrize("crop", ["rkrc", "rkrr"])
@pytest.mark.parametrize(
    ("scale", "ratio"),
    # The last of them makes images so small that they are mirrored more than once.
    [((0.8, 1.0), (0.9, 1 / 0.9)), ((0.08, 1.0), (0.75, 4 / 3)), ((0.5, 2.0), (0.5, 2.0)), ((1.0, 30.0), (0.9, 1.1))],
)
@pytest.mark.parametrize(("interpolation", "limit"), [("lanczos", 0), ("nearest", 0), ("bilinear", 1)])
def test_pixels_are_timms(
    monkeypatch: pytest.MonkeyPatch,
    crop: str,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    interpolation: str,
    limit: int,
) -> None:
    """The same pixels where Pillow resizes here, too; bilinear is torch's, which rounds otherwise."""
    theirs = transforms_imagenet_train(
        24, scale, ratio, crop, hflip=0.0, color_jitter=None, interpolation=interpolation, normalize=False
    )
    augment = Augment(crop=crop, scale=scale, ratio=ratio, interpolation=interpolation)  # type: ignore[arg-type]
    ours = ImageTransform(augment, 24, training=True)
    for image, word in zip(IMAGES, KEYS, strict=True):
        monkeypatch.setattr(timm.data.transforms, "random", Drawn(word))
        expected = theirs(to_pil_image(image))
        found = ours([image], word[None])[0]
        assert (found.int() - expected.int()).abs().max() <= limit, image.shape


def test_a_jpeg_is_decoded_smaller_only_where_both_sides_stay_large_enough() -> None:
    image = to_pil_image(torch.nn.functional.interpolate(torch.rand(1, 3, 6, 9, generator=NUMBERS), (240, 400))[0])
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95)
    keys = hashed(key(2), torch.arange(30))
    augment = Augment(crop="rkrr", scale=(0.3, 1.0))
    exact, fast = (ImageTransform(augment, 32, training=True, decodes_smaller=fast) for fast in (False, True))
    images = [LazyImage(file.getvalue(), 3) for _ in range(2 * len(keys))]
    one, other = exact(images[: len(keys)], keys), fast(images[len(keys) :], keys)
    difference = (one.float() - other.float()).abs()
    assert 0 < difference.mean() < 3


def test_squash_is_timms_training_without_augmentation() -> None:
    from timm.data import create_transform

    theirs = create_transform((3, 24, 24), is_training=True, no_aug=True, interpolation="hamming", use_prefetcher=True)
    ours = ImageTransform(Augment(crop="squash", interpolation="hamming"), 24, training=True)
    found = ours(IMAGES[:4], KEYS[:4])
    for image, pixels in zip(IMAGES, found, strict=False):
        expected = theirs(to_pil_image(image))
        assert torch.equal(pixels, torch.as_tensor(np.asarray(expected)))
    evaluated = ImageTransform(Augment(crop="squash", resize=24), 24, training=False)(IMAGES[1:2], KEYS[:1])[0]
    centre = ImageTransform(Augment(resize=24), 24, training=False)(IMAGES[1:2], KEYS[:1])[0]
    assert torch.equal(evaluated, centre)  # a crop of training
