"""Vertical flips, interpolation, and augmentation that does not fit the images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import chisquare
from torchvision.transforms import v2

from accel_train.config.checks import check_channels
from accel_train.config.schema import Augment, Config, Data
from accel_train.data.batch_transform import BatchTransform
from accel_train.data.image_transform import ImageTransform
from accel_train.data.loading import create_input_pipeline
from accel_train.data.order import EvaluationSampler, Plan, TrainingSampler
from accel_train.data.sources.load import load_splits
from accel_train.errors import UserError
from accel_train.keyed import hashed, key
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.environment import Launch
from accel_train.records.model_info import ModelInfo
from accel_train.tools.load_run import Preprocessing

COUNT, SIZE = 200, 17  # an odd size, so that vectorised loops have a rest
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randint(256, (COUNT, 3, SIZE, SIZE), generator=GENERATOR, dtype=torch.uint8)
IMAGES[:20] //= 250  # nearly black
IMAGES[20:40] = IMAGES[20:40, :1]  # grey


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
        ({"policy": "augmix"}, 3, 1, r"--augment\.policy augmix: needs images of uint8; the data has float"),
        ({"policy": "augmix"}, 4, 255, r"--augment\.policy augmix: needs images of 1 or 3 channels; the data has 4"),
    ],
)
def test_what_does_not_fit_the_images_is_said(settings: dict, channels: int, full_scale: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_channels(Augment(**settings), channels, full_scale)
    check_channels(Augment(flip=0.5, vertical_flip=0.5), channels, full_scale)


class TestInterpolation:
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
                data = Data(name="folder", root=tmp_path, workers=0)
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
            differ = found["bicubic", training] != found["bilinear", training]
            assert differ.flatten(1).any(1).all()
