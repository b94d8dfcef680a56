"""Transforms of single images are functions of each image's key, in any batch and in any worker process."""

import dataclasses
import io
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loaders import loader_of
from PIL import Image, ImageOps
from scipy.stats import ks_2samp
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from accel_train.config.schema import Augment, Data
from accel_train.data.batch_transform import resize_default
from accel_train.data.image_transform import ImageTransform, center_cropped, crop_boxes, resized_to_short_side
from accel_train.data.order import Plan, TrainingSampler
from accel_train.data.sources.images import LazyImage, decode
from accel_train.data.sources.load import Source, load_splits
from accel_train.keyed import hashed, key

NUMBERS = torch.Generator().manual_seed(0)
SHAPES = [(3, 40, 40), (3, 31, 57), (3, 64, 33), (3, 20, 90)] * 6
IMAGES = [torch.randint(256, shape, generator=NUMBERS, dtype=torch.uint8) for shape in SHAPES]
KEYS = hashed(key(1, 0, "augment"), torch.arange(len(IMAGES)))

POLICIES = {
    "flipped": Augment(crop="resized", flip=0.5),
    "resized": Augment(crop="resized"),
    "random": Augment(crop="random", pad=3, resize=28),
    "reflected": Augment(crop="random", pad=3, pad_mode="reflect", resize=28),
    "randaugment": Augment(crop="resized", policy="randaugment"),
    "trivialaugment": Augment(crop="random", policy="trivialaugment"),
    "autoaugment": Augment(crop="resized", policy="autoaugment"),
    "autoaugment_svhn": Augment(crop="resized", policy="autoaugment_svhn"),
    "augmix": Augment(crop="resized", policy="augmix"),
    **{policy: Augment(crop="resized", flip=0.5, policy=policy) for policy in ("rand-m9-n2-mstd0.5-inc1", "v0", "3a")},
    "timm's augmix": Augment(crop="resized", policy="augmix-m5-w4-d2", train_interpolation="random"),
    "either": Augment(crop="resized", flip=0.5, train_interpolation="random"),
    "squashed": Augment(crop="squash", interpolation="bicubic", flip=0.5, policy="augmix"),
    "upended": Augment(crop="resized", flip=0.5, vertical_flip=0.5),
}


@pytest.mark.parametrize("augment", POLICIES.values(), ids=POLICIES)
class TestTraining:
    def test_an_image_looks_the_same_in_any_batch(self, augment: Augment) -> None:
        transform = ImageTransform(augment, 24, training=True)
        whole = transform(IMAGES, KEYS)
        assert whole.shape == (len(IMAGES), 3, 24, 24) and whole.dtype == torch.uint8
        order = torch.randperm(len(IMAGES), generator=torch.Generator().manual_seed(1)).tolist()
        for size in (1, 5):
            for at in range(0, len(order), size):
                some = order[at : at + size]
                assert torch.equal(transform([IMAGES[i] for i in some], KEYS[some]), whole[some])

    def test_other_keys_give_other_images(self, augment: Augment) -> None:
        transform = ImageTransform(augment, 24, training=True)
        first, second = (transform(IMAGES, hashed(key(1, epoch, "augment"), torch.arange(24))) for epoch in (0, 1))
        assert (first != second).flatten(1).any(1).float().mean() > 0.9
        one = transform([IMAGES[0]] * 20, hashed(key(2), torch.arange(20)))
        assert len(one.flatten(1).unique(dim=0)) > 15

    def test_no_generator_is_moved_or_looked_at(self, augment: Augment) -> None:
        transform = ImageTransform(augment, 24, training=True)
        looks = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            before = torch.get_rng_state(), random.getstate(), np.random.get_state(False)["state"]["key"].copy()
            looks.append(transform(IMAGES, KEYS))
            assert torch.equal(torch.get_rng_state(), before[0])
            assert random.getstate() == before[1]
            assert (np.random.get_state(False)["state"]["key"] == before[2]).all()
        assert torch.equal(*looks)


class TestResizedCrop:
    SIZES = ((300, 400), (333, 250), (100, 1000), (900, 90), (64, 64))

    @staticmethod
    def boxes(height: int, width: int, count: int = 20_000, **bounds: tuple[float, float]) -> torch.Tensor:
        bounds = {"scale": (0.08, 1.0), "ratio": (0.75, 4 / 3), **bounds}
        keys = hashed(key(9), torch.arange(count))
        return crop_boxes(keys, torch.full((count,), height), torch.full((count,), width), **bounds)

    @pytest.mark.ci
    @pytest.mark.parametrize(("height", "width"), SIZES)
    def test_boxes_are_distributed_as_torchvisions(self, height: int, width: int) -> None:
        count = 4000
        top, left, h, w = self.boxes(height, width, count).double().T
        assert (h >= 1).all() and (w >= 1).all() and (top >= 0).all() and (left >= 0).all()
        assert (top + h <= height).all() and (left + w <= width).all()
        torch.manual_seed(0)
        image = torch.empty(1, height, width)
        theirs = [v2.RandomResizedCrop(10).make_params([image]) for _ in range(count)]
        expected = {name: np.array([each[name] for each in theirs]) for name in ("top", "left", "height", "width")}
        found = {"top": top, "left": left, "height": h, "width": w}
        for name, values in found.items():
            assert ks_2samp(values.numpy(), expected[name]).pvalue > 1e-4, name
        assert ks_2samp((h * w).numpy(), expected["height"] * expected["width"]).pvalue > 1e-4

    def test_a_box_that_never_fits_is_the_middle(self) -> None:
        wide = self.boxes(10, 1000, 200, ratio=(0.75, 4 / 3), scale=(0.9, 1.0))
        assert torch.equal(wide, torch.tensor([0, (1000 - 13) // 2, 10, 13]).expand(200, 4))
        high = self.boxes(1000, 10, 200, ratio=(0.75, 4 / 3), scale=(0.9, 1.0))
        assert torch.equal(high, torch.tensor([(1000 - 13) // 2, 0, 13, 10]).expand(200, 4))

    def test_pixels_are_those_of_torchvisions_resized_crop(self) -> None:
        found = ImageTransform(POLICIES["resized"], 24, training=True)(IMAGES, KEYS)
        heights, widths = torch.tensor([image.shape[1:] for image in IMAGES]).T
        boxes = crop_boxes(KEYS, heights, widths, (0.08, 1.0), (0.75, 4 / 3)).tolist()
        for image, box, turned in zip(IMAGES, boxes, found, strict=True):
            expected = v2.functional.resized_crop(image, *box, [24, 24], antialias=True)
            assert (turned.float() - expected.float()).abs().max() <= 1


class TestDecodedSmaller:
    """Training, but not evaluation, decodes a JPEG of at least twice the needed size at a smaller scale."""

    @staticmethod
    def encoded(width: int, height: int, format: str = "JPEG") -> bytes:
        coarse = np.random.default_rng(0).integers(0, 256, (3, 4, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(file, format)
        return file.getvalue()

    @pytest.mark.parametrize("augment", [Augment(crop="resized"), Augment(crop="random"), Augment()])
    @pytest.mark.parametrize(("width", "height"), [(640, 480), (641, 483), (200, 150), (31, 33)])
    def test_looks_like_the_full_one(self, augment: Augment, width: int, height: int) -> None:
        data, size = self.encoded(width, height), 24
        keys = hashed(key(3), torch.arange(12))
        for training in (True, False):
            transform = ImageTransform(augment, size, training=training)
            smaller = transform([LazyImage(data, 3) for _ in keys], keys)
            full = transform([LazyImage(data, 3).pixels() for _ in keys], keys)
            if training and width > 100:
                assert not torch.equal(smaller, full)
                assert (smaller.float() - full.float()).abs().mean() < 6
                again = transform([LazyImage(data, 3)], keys[:1])
                assert torch.equal(again, smaller[:1])
            elif not training:
                assert torch.equal(smaller, full)

    def test_other_formats_come_as_they_are(self) -> None:
        data, keys = self.encoded(640, 480, "PNG"), hashed(key(3), torch.arange(12))
        transform = ImageTransform(Augment(crop="resized"), 24, training=True)
        pictures = transform([LazyImage(data, 3) for _ in keys], keys)
        assert torch.equal(pictures, transform([LazyImage(data, 3).pixels() for _ in keys], keys))

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_the_crop_is_cut_where_it_was_drawn(self, orientation: int) -> None:
        """Compare with Pillow's resize of the same part of the image. A crop at whole reduced pixels gives 33 dB."""
        generator = np.random.default_rng(0)
        y, x = np.fft.fftfreq(701)[:, None], np.fft.fftfreq(1003)
        spectrum = generator.normal(size=(701, 1003, 3)) / np.maximum(np.hypot(y, x), 1e-3)[..., None]  # as photographs
        values = np.fft.fft2(spectrum, axes=(0, 1)).real
        pixels = np.clip(128 + 40 * values / values.std(), 0, 255).astype(np.uint8)
        file = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(pixels).save(file, "JPEG", quality=95, exif=exif)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(file.getvalue())))
        keys, found = hashed(key(4), torch.arange(60)), []
        boxes = crop_boxes(
            keys, torch.full((60,), upright.height), torch.full((60,), upright.width), (0.08, 1.0), (0.75, 4 / 3)
        )
        augment = Augment(crop="resized")
        cut = ImageTransform(augment, 48, training=True)([LazyImage(file.getvalue(), 3)], keys[:1])
        assert not torch.equal(cut, ImageTransform(augment, 48, training=True)([decode(file.getvalue(), 3)], keys[:1]))
        for word, (top, left, height, width) in zip(keys, boxes.tolist(), strict=True):
            cut = ImageTransform(augment, 48, training=True)([LazyImage(file.getvalue(), 3)], word[None])[0]
            part = upright.resize((48, 48), Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
            difference = cut.permute(1, 2, 0).numpy().astype(float) - np.asarray(part)
            found.append(10 * np.log10(255**2 / max((difference**2).mean(), 1e-9)))
        assert np.median(found) > 44 and min(found) > 34


def test_a_random_crop_sees_torchvisions_reflection() -> None:
    settings = Augment(crop="random", pad=5, pad_mode="reflect", resize=28, flip=0.5)
    found = ImageTransform(settings, 28, training=True)(IMAGES, KEYS)
    padded = [
        v2.functional.pad(v2.functional.resize(image, [28], antialias=True), [5] * 4, padding_mode="reflect")
        for image in IMAGES
    ]
    expected = ImageTransform(dataclasses.replace(settings, pad=0, resize=38), 28, training=True)(padded, KEYS)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("short_side", [7, 20, 33, 80])
def test_resizing_gives_torchvisions_size_and_pixels(short_side: int) -> None:
    """Its pixels within 1: its older versions resize uint8 in float32 on some CPUs."""
    for image in IMAGES:
        resized = resized_to_short_side(image, short_side)
        theirs = v2.functional.resize(image, [short_side], antialias=True)
        assert resized.shape == theirs.shape
        assert (resized.int() - theirs.int()).abs().max() <= 1


@given(st.integers(8, 40), st.none() | st.integers(0, 20))
def test_evaluation_crops_the_middle_and_draws_nothing(size: int, larger: int | None) -> None:
    augment = dataclasses.replace(POLICIES["trivialaugment"], resize=None if larger is None else size + larger)
    transform = ImageTransform(augment, size, training=False)
    found = transform(IMAGES[:4], KEYS[:4])
    assert found.shape == (4, 3, size, size)
    assert torch.equal(found, transform(IMAGES[:4], KEYS[4:8]))
    short = size + larger if larger is not None else resize_default(size)
    grey = transform([torch.arange(short, dtype=torch.uint8).expand(3, short, short)], KEYS[:1])[0]
    left = round((short - size) / 2)
    assert grey[0, 0].tolist() == list(range(left, left + size))


class TestLoader:
    """From the source to the loader's batch."""

    @staticmethod
    def seen(source: Source, augment: Augment, batch_size: int, workers: int, update: int = 0) -> dict[int, bytes]:
        """Return sample -> pixels, from update `update` of epoch 3."""
        order = TrainingSampler(Plan(len(source), batch_size, 1, 1), 5)
        order.seek(3, update * batch_size)
        loader = loader_of(source, order, augment, seed=5, workers=workers)
        found: dict[int, Any] = {}
        for batch in loader:
            for number, image in zip(batch["ids"].tolist(), batch["images"], strict=True):
                pixels = image.numpy().tobytes()
                assert found.setdefault(number, pixels) == pixels  # padding repeats samples
        return found

    @pytest.mark.parametrize(
        "policy", [*(pytest.param(name, marks=pytest.mark.ci) for name in ("trivialaugment", "augmix")), "none"]
    )
    def test_any_batch_size_any_worker_any_restart(self, policy: str) -> None:
        source = load_splits(Data(train_limit=100), 0).train
        augment = Augment(crop="random", pad=1, policy=policy)  # type: ignore[arg-type]
        expected = self.seen(source, augment, 10, 0)
        assert len(expected) == 100
        assert self.seen(source, augment, 32, 0) == expected
        assert self.seen(source, augment, 10, 2) == expected
        tail = self.seen(source, augment, 10, 1, update=6)
        assert len(tail) == 40 and tail.items() <= expected.items()

    def test_a_worker_that_outlives_an_epoch_follows_it(self) -> None:
        source = load_splits(Data(train_limit=40), 0).train
        order = TrainingSampler(Plan(40, 20, 1, 1), 5)
        loader = loader_of(source, order, Augment(policy="trivialaugment"), seed=5, workers=1)
        epochs = []
        for epoch in (3, 4, 3):
            order.seek(epoch)
            batches = list(loader)
            epochs.append([torch.cat([batch[name] for batch in batches]) for name in ("ids", "keys", "images")])
        assert all(torch.equal(first, third) for first, third in zip(epochs[0], epochs[2], strict=True))
        assert not any(torch.equal(first, second) for first, second in zip(epochs[0], epochs[1], strict=True))


@pytest.mark.parametrize(
    ("policy", "theirs"),
    [
        ("augmix", v2.AugMix),
        ("randaugment", v2.RandAugment),
        ("trivialaugment", v2.TrivialAugmentWide),
        ("autoaugment", v2.AutoAugment),
        ("autoaugment_cifar10", partial(v2.AutoAugment, v2.AutoAugmentPolicy.CIFAR10)),
        ("autoaugment_svhn", partial(v2.AutoAugment, v2.AutoAugmentPolicy.SVHN)),
    ],
)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_policy_is_torchvisions_with_the_images_key_as_its_seed(
    policy: str, theirs: Callable[..., v2.Transform], interpolation: str
) -> None:
    """As torchvision's presets have it: of PIL images, with the interpolation of the resizing. They have no AugMix with
    bicubic, which fails."""
    augment = Augment(policy=policy, resize=20, interpolation=interpolation)  # type: ignore[arg-type]
    used = "bilinear" if policy == "augmix" else interpolation
    transform = theirs(interpolation=v2.InterpolationMode(used))
    images = [image[:, :20, :20].contiguous() for image in IMAGES]
    for channels in (3, 1):
        some = [image[:channels] for image in images]
        found = ImageTransform(augment, 20, training=True)(some, KEYS)
        for image, word, ours in zip(some, KEYS.tolist(), found, strict=True):
            with torch.random.fork_rng():
                torch.manual_seed(word)
                assert torch.equal(ours, F.pil_to_tensor(transform(F.to_pil_image(image))))


@pytest.mark.parametrize("size", [1, 10, 11, 12, 24, 40, 91])
def test_the_middle_is_torchvisions(size: int) -> None:
    for image in IMAGES:
        assert torch.equal(center_cropped(image, size), v2.functional.center_crop(image, [size, size]))
