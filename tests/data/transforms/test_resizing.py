"""Interpolations: the pixels of Pillow, which are those of timm's and torchvision's training."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from accel_train.config.declaration import PILLOWS_OWN
from accel_train.config.schema import Augment
from accel_train.data.transforms.batch import BatchTransform
from accel_train.data.transforms.image import ImageTransform, crop_boxes, resized_by_pillow
from accel_train.data.transforms.parameters import resize_default
from accel_train.errors import UserError
from accel_train.keyed import hashed, key

NUMBERS = torch.Generator().manual_seed(0)
IMAGES = [
    torch.randint(256, shape, generator=NUMBERS, dtype=torch.uint8)
    for shape in [(3, 40, 40), (3, 31, 57), (3, 64, 33), (3, 20, 90), (3, 11, 13)]
]
KEYS = hashed(key(1), torch.arange(len(IMAGES)))


@pytest.mark.parametrize("interpolation", PILLOWS_OWN)
class TestPillows:
    def test_training_and_evaluation_have_pillows_pixels(self, interpolation: str) -> None:
        mode, side = InterpolationMode(interpolation), resize_default(24)
        augment = Augment(crop="resized", interpolation=interpolation)  # type: ignore[arg-type]
        trained = ImageTransform(augment, 24, training=True)(IMAGES, KEYS)
        evaluated = ImageTransform(augment, 24, training=False)(IMAGES, KEYS)
        heights, widths = torch.tensor([image.shape[1:] for image in IMAGES]).T
        boxes = crop_boxes(KEYS, heights, widths, augment.scale, augment.ratio).tolist()
        for number, image in enumerate(IMAGES):
            picture = F.to_pil_image(image)
            crop = F.resized_crop(picture, *boxes[number], [24, 24], mode)
            assert torch.equal(trained[number], F.pil_to_tensor(crop))
            whole = F.center_crop(F.resize(picture, [side], mode), [24])
            assert torch.equal(evaluated[number], F.pil_to_tensor(whole))

    def test_so_have_images_of_one_size(self, interpolation: str) -> None:
        images = torch.randint(256, (5, 3, 20, 20), generator=NUMBERS, dtype=torch.uint8)
        found = in_batches(interpolation, images, 255)
        for image, pixels in zip(images, found, strict=True):
            expected = F.resize(F.to_pil_image(image), [32], InterpolationMode(interpolation))
            assert torch.equal(pixels.round().to(torch.uint8), F.pil_to_tensor(expected))

    def test_images_of_floats_are_not_rounded(self, interpolation: str) -> None:
        images = torch.rand(2, 5, 20, 20, generator=NUMBERS)
        found = in_batches(interpolation, images, 1)
        for image, pixels in zip(images.flatten(0, 1), found.flatten(0, 1), strict=True):
            expected = Image.fromarray(image.numpy()).resize((32, 32), Image.Resampling[interpolation.upper()])
            torch.testing.assert_close(pixels, torch.tensor(expected.get_flattened_data()).view(32, 32))


def in_batches(interpolation: str, images: Tensor, full_scale: int) -> Tensor:
    """The images, resized from 20 to 32 pixels on the device."""
    channels = images.shape[1]
    transform = BatchTransform(
        Augment(interpolation=interpolation),  # type: ignore[arg-type]
        size=32,
        mean=(0.0,) * channels,
        std=(1 / full_scale,) * channels,
        num_classes=5,
        training=False,
        per_image=False,
        device=torch.device("cpu"),
        full_scale=full_scale,
    )
    pixels: Tensor = transform({"images": images, "labels": torch.zeros(len(images), dtype=torch.int64)})[0]
    return pixels


def test_pillow_resizes_any_number_of_channels() -> None:
    image = torch.randint(256, (6, 17, 23), generator=NUMBERS, dtype=torch.uint8)
    found = resized_by_pillow(image, 9, 40, "box")
    assert found.shape == (6, 9, 40) and torch.equal(found[2:4], resized_by_pillow(image[2:4], 9, 40, "box"))


def test_nearest_is_not_taken_from_a_smaller_decoding() -> None:
    assert ImageTransform(Augment(interpolation="lanczos"), 24, training=True).decodes_smaller
    assert not ImageTransform(Augment(interpolation="nearest"), 24, training=True).decodes_smaller


def test_images_are_turned_as_pillow_can() -> None:
    """It turns with three of them; ImageTransform is made before the first update."""
    for more in ({"policy": "rand-m9"}, {"policy": "randaugment"}):
        with pytest.raises(UserError, match=r"--augment.interpolation box: images can be resized with it, but not"):
            ImageTransform(Augment(interpolation="box", **more), 24, training=True)  # type: ignore[arg-type]
        ImageTransform(Augment(interpolation="box", **more), 24, training=False)  # type: ignore[arg-type]
        for keys in (KEYS, KEYS.flip(0)):
            near = Augment(interpolation="nearest", **more)  # type: ignore[arg-type]
            assert ImageTransform(near, 24, training=True)(IMAGES, keys).dtype == torch.uint8
