"""Colour jitter of a batch: torchvision's pixels and distribution, whatever the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import chisquare, ks_2samp
from torchvision.transforms import v2

from accel_train.config.checks import check_channels
from accel_train.config.schema import Augment, Config, Data
from accel_train.data.loading import create_input_pipeline
from accel_train.data.order.plan import Plan
from accel_train.data.order.samplers import EvaluationSampler, TrainingSampler
from accel_train.data.sources.load import load_splits
from accel_train.data.transforms.batch import BatchTransform, jitter_colours
from accel_train.data.transforms.image import ImageTransform
from accel_train.data.transforms.parameters import AugmentParameters, Column, Jitter
from accel_train.errors import UserError
from accel_train.keyed import hashed, key
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.environment import Launch
from accel_train.records.model_info import ModelInfo
from accel_train.tools.inference import Preprocessing

COUNT, SIZE = 200, 17  # an odd size, so that vectorised loops have a rest
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randint(256, (COUNT, 3, SIZE, SIZE), generator=GENERATOR, dtype=torch.uint8)
IMAGES[:20] //= 250  # nearly black
IMAGES[20:40] = IMAGES[20:40, :1]  # grey
ALL: dict[str, Any] = {"color_jitter": (0.4, 0.3, 0.6, 0.1)}
FUNCTIONS = v2.functional.adjust_brightness, v2.functional.adjust_contrast, v2.functional.adjust_saturation


def drawn(augment: Augment, count: int = COUNT, size: int = SIZE) -> torch.Tensor:
    keys = hashed(key(5, 0, "augment"), torch.arange(count))
    return AugmentParameters(augment, size, per_image=True)(keys, torch.ones(count))


def floats(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.float32)


def changed(which: torch.Tensor | slice = slice(None), images: torch.Tensor = IMAGES, **settings: Any) -> torch.Tensor:
    augment = Augment(**settings)
    return jitter_colours(images[which], drawn(augment)[which], augment)


class TestPixels:
    def test_they_are_torchvisions(self) -> None:
        augment = Augment(**ALL)
        found, orders = changed(**ALL), set()
        for image, row, ours in zip(IMAGES, drawn(augment), found, strict=True):
            theirs, order = image / 255, []
            for slot in range(6):
                if slot == 3 and (shift := float(floats(row[Column.HUE])) / 6) != 0:
                    theirs = v2.functional.adjust_hue(theirs, shift)
                    order.append(Jitter.HUE)
                factor, kind = float(floats(row[Column.FACTOR + slot])), int(row[Column.KIND + slot])
                if factor != 1:
                    theirs = FUNCTIONS[kind](theirs, factor)
                    order.append(Jitter(kind))
            assert torch.allclose(ours, theirs * 255, rtol=0, atol=0.02)
            orders.add(tuple(order))
        assert len(orders) > 20 and {len(order) for order in orders} == {4}

    def test_one_channel(self) -> None:
        grey, settings = IMAGES[:, :1], {"color_jitter": (0.4,)}
        colour = changed(images=grey.expand_as(IMAGES), **settings)  # type: ignore[arg-type]
        found = changed(images=grey, **settings)  # type: ignore[arg-type]
        assert found.shape == grey.shape and torch.allclose(found, colour[:, :1], rtol=0, atol=0.05)


class TestPurity:
    @pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
    def test_an_image_has_the_same_bits_in_any_batch(self, layout: torch.memory_format) -> None:
        whole = changed(**ALL)
        images = IMAGES.contiguous(memory_format=layout)
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(1))
        for size in (1, 7, 64, COUNT):
            for which in order.split(size):
                assert torch.equal(changed(which, images, **ALL), whole[which])

    def test_large_images_do_not_depend_on_the_number_of_threads(self) -> None:
        images = torch.randint(256, (3, 3, 300, 400), generator=GENERATOR, dtype=torch.uint8)
        augment = Augment(color_jitter=(0.4, 0.4, 0.4, 0.1))
        threads, found = torch.get_num_threads(), []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(jitter_colours(images, drawn(augment, 3, 300), augment))
        torch.set_num_threads(threads)
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])

    def test_always(self) -> None:
        jittered = changed(color_jitter=(0.4, 0.4, 0.4, 0.1))[40:]
        assert (jittered != IMAGES[40:]).flatten(1).any(1).all()


class TestDistribution:
    COUNT = 6000

    def test_of_the_jitter_is_torchvisions(self) -> None:
        strengths = (0.4, 1.5, 0.6, 0.1)
        rows = drawn(Augment(color_jitter=strengths), self.COUNT)
        theirs = v2.ColorJitter(*strengths)
        torch.manual_seed(0)
        expected = [theirs.make_params([IMAGES[0]]) for _ in range(self.COUNT)]
        names = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
        factors, kinds = floats(rows[:, Column.FACTOR : Column.FACTOR + 6]), rows[:, Column.KIND : Column.KIND + 6]
        found = [factors[(kinds == kind) & (factors != 1)] for kind in range(3)]
        found.append(floats(rows[:, Column.HUE]) / 6)
        for values, name in zip(found, names, strict=True):
            assert abs(len(values) - self.COUNT) < 5  # each once; a factor may be 1 by chance
            assert ks_2samp(values.numpy(), [float(each[name]) for each in expected]).pvalue > 1e-4, name
        # The 24 orders are equally frequent.
        orders = [
            tuple(
                kind
                for slot in range(6)
                for kind in ([3] if slot == 3 else []) + ([int(row[slot])] if used[slot] else [])
            )
            for row, used in zip(kinds, (factors != 1).tolist(), strict=True)
        ]
        whole = [order for order in orders if sorted(order) == [0, 1, 2, 3]]
        counts = np.unique(whole, axis=0, return_counts=True)[1]
        assert len(whole) > self.COUNT - 5 and len(counts) == 24 and chisquare(counts).pvalue > 1e-4

    def test_without_a_hue_the_six_orders_are_equally_frequent(self) -> None:
        rows = drawn(Augment(color_jitter=(0.4,)), self.COUNT)
        assert (floats(rows[:, Column.FACTOR + 3 : Column.FACTOR + 6]) == 1).all()
        counts = np.unique(rows[:, Column.KIND : Column.KIND + 3].numpy(), axis=0, return_counts=True)[1]
        assert len(counts) == 6 and chisquare(counts).pvalue > 1e-4


class TestVerticalFlip:
    def test_of_batches_and_of_single_images(self) -> None:
        images = IMAGES[:, :, :12, :12]
        keys = hashed(key(5, 0, "augment"), torch.arange(COUNT))
        found = {}
        for horizontal, vertical in ((0.0, 0.0), (0.0, 0.4), (0.4, 0.4)):
            augment = Augment(flip=horizontal, vertical_flip=vertical)
            single = ImageTransform(Augment(flip=horizontal, vertical_flip=vertical, resize=12), 12, training=True)
            transform = BatchTransform(
                augment, size=12, mean=(0.0,) * 3, std=(1 / 255,) * 3, num_classes=5, training=True, per_image=False,
                device=torch.device("cpu"),
            )  # fmt: skip
            batch = {"images": images, "labels": torch.zeros(COUNT, dtype=torch.int64)}
            if transform.draw_parameters is not None:
                batch["parameters"] = transform.draw_parameters(keys, torch.ones(COUNT))
            found[horizontal, vertical] = transform(batch)[0]
            assert torch.equal(found[horizontal, vertical], single(list(images), keys).float())
        ways = [images.float(), *(images.float().flip(dims) for dims in ([2], [3], [2, 3]))]
        counts = [int((found[0.4, 0.4] == way).flatten(1).all(1).sum()) for way in ways]
        assert (
            sum(counts) == COUNT and chisquare(counts, [0.36 * COUNT, *[0.24 * COUNT] * 2, 0.16 * COUNT]).pvalue > 1e-4
        )


@pytest.mark.parametrize(
    ("settings", "channels", "full_scale", "message"),
    [
        ({"policy": "augmix"}, 3, 1, r"--augment\.policy augmix: needs images of uint8"),
        ({"color_jitter": (0.4,)}, 3, 1, r"--augment\.color-jitter: needs images of uint8; the data has float"),
        ({"color_jitter": (0.4,)}, 4, 255, r"--augment\.color-jitter: needs images of 1 or 3 channels; the data has 4"),
        ({"color_jitter": (0.0, 0.0, 0.0, 0.1)}, 1, 255, r"the images are grey and have no hue"),
    ],
)
def test_what_does_not_fit_the_images_is_said(settings: dict, channels: int, full_scale: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_channels(Augment(**settings), channels, full_scale)
    check_channels(Augment(flip=0.5, vertical_flip=0.5), channels, full_scale)


class TestInterpolation:
    BICUBIC = Augment(interpolation="bicubic")

    def test_pixels_are_torchvisions(self) -> None:
        mode = v2.InterpolationMode.BICUBIC
        sharp = (IMAGES[40:60] > 127).to(torch.uint8) * 255  # bicubic overshoots
        single = ImageTransform(Augment(interpolation="bicubic", resize=40), 40, training=False)
        expected = v2.functional.resize(sharp, [40, 40], mode, antialias=True)
        found = single(list(sharp), torch.zeros(20))
        assert (found.int() - expected.int()).abs().max() <= 1
        whole = BatchTransform(
            Augment(interpolation="bicubic", resize=40), size=40, mean=(0.0,) * 3, std=(1 / 255,) * 3, num_classes=5,
            training=False, per_image=False, device=torch.device("cpu"),
        )({"images": sharp, "labels": torch.zeros(20, dtype=torch.int64)})[0]  # fmt: skip
        # As floats: of uint8 images torchvision rounds and clamps twice, after each axis.
        as_floats = v2.functional.resize(sharp.float(), [40, 40], mode, antialias=True)
        assert as_floats.max() > 260 and torch.allclose(whole, as_floats.clamp(0, 255), atol=1e-3)
        bilinear = ImageTransform(Augment(resize=40), 40, training=False)(list(sharp), torch.zeros(20))
        assert (bilinear.int() - expected.int()).abs().max() > 20

    @pytest.mark.parametrize("crop", ["center", "resized"])
    def test_of_files_in_training_evaluation_and_prediction(self, tmp_path: Path, crop: str) -> None:
        for number, side in enumerate((50, 70, 200, 90)):  # the third is decoded smaller in training
            path = tmp_path / "train" / str(number % 2) / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(number).integers(0, 256, (side, side + 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
        found = {}
        for interpolation in ("bilinear", "bicubic"):
            augment = Augment(interpolation=interpolation, crop=crop)  # type: ignore[arg-type]
            for training in (True, False):
                data = Data(name="folder", root=tmp_path, workers=0, reduced_decode=False)
                splits = load_splits(data, 0)
                order = TrainingSampler(Plan(4, 2, 1, 1), 0) if training else EvaluationSampler(4, 4)
                config = Config(data=data, augment=augment)
                feed = create_input_pipeline(
                    config, splits, splits.train, order, create_accelerator(Launch()), training=training, size=32
                )
                batches = list(feed.batches)
                ids, images = (torch.cat([batch[name] for batch in batches]) for name in ("ids", "images"))
                found[interpolation, training] = images[ids.argsort()]
            info = ModelInfo(("a", "b"), 3, 32, None, (0.0,) * 3, (1 / 255,) * 3)
            prepared = Preprocessing(info, augment)
            files = [splits.train.open(number).pixels() for number in range(4)]  # type: ignore[attr-defined]
            predicted = torch.cat([prepared.resize(image) for image in files])
            assert torch.equal(predicted, found[interpolation, False])
        for training in (True, False):
            assert not torch.equal(found["bicubic", training], found["bilinear", training])

    def test_of_a_jpeg_that_is_decoded_smaller(self, tmp_path: Path) -> None:
        coarse = np.random.default_rng(0).integers(0, 256, (9, 9, 3), dtype=np.uint8)
        (tmp_path / "train/a").mkdir(parents=True)
        (tmp_path / "train/b").mkdir()
        for name in "ab":
            Image.fromarray(coarse).resize((200, 200)).save(tmp_path / f"train/{name}/1.jpg")
        source = load_splits(Data(name="folder", root=tmp_path), 0).train
        bilinear, bicubic = (
            ImageTransform(Augment(interpolation=name, crop="resized"), 32, training=True)(
                [source.open(0)],  # type: ignore[attr-defined]
                torch.tensor([3]),  # type: ignore[attr-defined]
            )
            for name in ("bilinear", "bicubic")
        )
        difference = (bilinear.float() - bicubic.float()).abs()
        assert 0 < difference.mean() < 10
