"""Augmentation is a function of each sample's key, equal to a plain implementation for one image."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, kstest
from torchvision.transforms import v2

from accel_train.config.schema import Augment
from accel_train.data.batch_transform import BatchTransform, Stream, beta_quantiles
from accel_train.keyed import hashed, key, uniform

MEAN, STD = (0.2, 0.5, 0.7), (0.3, 0.25, 0.1)
CLASSES = 5
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randint(256, (301, 3, 12, 12), generator=GENERATOR, dtype=torch.uint8)
LABELS = torch.randint(CLASSES, (301,), generator=GENERATOR)


def keys_of(count: int, epoch: int = 0) -> torch.Tensor:
    return hashed(key(5, epoch, "augment"), torch.arange(count))


def batch_of(which: torch.Tensor | slice = slice(None), padding: int = 0, epoch: int = 0) -> dict[str, torch.Tensor]:
    """Return some of the 301 samples; the last `padding` of them have weight 0."""
    keys = keys_of(len(IMAGES), epoch)[which]
    weights = (torch.arange(len(keys)) < len(keys) - padding).float()
    return {"images": IMAGES[which], "labels": LABELS[which], "keys": keys, "weights": weights}


def created(
    size: int = 12,
    training: bool = True,
    grey: bool = False,
    layout: torch.memory_format = torch.contiguous_format,
    **augment: Any,
) -> Callable[[dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]:
    """Return the batch that a loader and a BatchTransform give. `grey`: for images of one channel, whose pixels
    only become float32."""
    transform = BatchTransform(
        Augment(**augment),
        size=size,
        mean=(0.0,) if grey else MEAN,
        std=(1 / 255,) if grey else STD,
        num_classes=CLASSES,
        training=training,
        per_image=False,
        device=torch.device("cpu"),
        memory_format=layout,
    )

    def drawn_and_transformed(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if transform.draw_parameters is not None:
            batch = {**batch, "parameters": transform.draw_parameters(batch["keys"], batch["weights"])}
        return transform(batch)

    return drawn_and_transformed


def normalised(image: np.ndarray) -> np.ndarray:
    """Normalise uint8 [3, h, w] to float32, in float32 arithmetic."""
    mean, std = (np.array(values, np.float32)[:, None, None] for values in (MEAN, STD))
    return image.astype(np.float32) / (std * np.float32(255)) - mean / std


def reference(image: np.ndarray, word: torch.Tensor, size: int, pad: int, flip: float, crop: str) -> np.ndarray:
    """Crop and flip of one image, written with slices."""
    top = left = (image.shape[1] - size) // 2
    if crop == "random":
        image = np.pad(image, ((0, 0), (pad, pad), (pad, pad)))
        places = image.shape[1] - size + 1
        top, left = (int(np.float32(float(uniform(word, at))) * places) for at in (Stream.TOP, Stream.LEFT))
    image = image[:, top : top + size, left : left + size]
    return image[:, :, ::-1] if uniform(word, Stream.FLIP) < flip else image


ALL: dict[str, Any] = {"crop": "random", "pad": 2, "flip": 0.5, "erase": 0.5}


class TestPurity:
    @given(st.data())
    def test_a_sample_looks_the_same_in_any_batch(self, data: st.DataObject) -> None:
        mode = data.draw(st.sampled_from(["const", "rand", "pixel"]))
        layout = data.draw(st.sampled_from([torch.contiguous_format, torch.channels_last]))
        size = data.draw(st.sampled_from([7, 10, 12]))
        transform = created(size=size, layout=layout, resize=12, erase_mode=mode, **ALL)
        whole = transform(batch_of())[0]
        which = torch.tensor(data.draw(st.lists(st.integers(0, len(IMAGES) - 1), min_size=1, max_size=40)))
        some, labels = transform(batch_of(which))
        assert torch.equal(some, whole[which])  # bitwise: equal as float32 numbers, of which none is NaN
        assert torch.equal(labels, LABELS[which])

    @pytest.mark.slow
    @pytest.mark.parametrize("resize", [14, 20, 33])
    def test_the_same_in_any_batch_when_resized_before(self, resize: int) -> None:
        transform = created(resize=resize, **ALL)
        whole = transform(batch_of())[0]
        for size in (1, 2, 3, 7, 16, 100):
            parts = [transform(batch_of(slice(at, at + size)))[0] for at in range(0, len(IMAGES), size)]
            assert torch.equal(torch.cat(parts), whole)

    def test_each_epoch_looks_different(self) -> None:
        first, second = (created(**ALL)(batch_of(epoch=epoch))[0] for epoch in (0, 1))
        assert (first != second).flatten(1).any(1).float().mean() > 0.9

    @pytest.mark.parametrize("training", [True, False])
    def test_the_global_generator_and_the_batch_stay_as_they_were(self, training: bool) -> None:
        torch.manual_seed(1)
        before, batch = torch.get_rng_state(), batch_of(slice(300))
        copies = {name: values.clone() for name, values in batch.items()}
        created(training=training, mixup=0.2, cutmix=1.0, **ALL)(batch)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(torch.equal(batch[name], copy) for name, copy in copies.items())

    def test_evaluation_draws_nothing(self) -> None:
        transform = created(size=8, resize=12, training=False, mixup=0.2, cutmix=1.0, **ALL)
        first, labels = transform(batch_of())
        second = transform(batch_of(epoch=1))[0]
        assert torch.equal(first, second) and torch.equal(labels, LABELS)
        expected = np.stack([normalised(image) for image in IMAGES[:, :, 2:10, 2:10].numpy()])
        assert np.array_equal(first.numpy(), expected)


class TestCropAndFlip:
    @pytest.mark.parametrize("size", [12, 9, 5])
    @pytest.mark.parametrize(("crop", "pad"), [("random", 0), ("random", 1), ("random", 4), ("center", 0)])
    @pytest.mark.parametrize("flip", [0.0, 0.3, 1.0])
    def test_equal_to_the_plain_implementation(self, size: int, crop: str, pad: int, flip: float) -> None:
        found = created(size=size, resize=12, crop=crop, pad=pad, flip=flip)(batch_of())[0]
        words = keys_of(len(IMAGES))
        expected = [
            normalised(reference(image, word, size, pad, flip, crop))
            for image, word in zip(IMAGES.numpy(), words, strict=True)
        ]
        assert np.array_equal(found.numpy(), np.stack(expected))

    @pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
    @pytest.mark.parametrize("size", [12, 9])
    @pytest.mark.parametrize("pad", [1, 4, 11])
    def test_reflection_is_torchvisions(self, layout: torch.memory_format, size: int, pad: int) -> None:
        batch = batch_of()
        batch["images"] = batch["images"].contiguous(memory_format=layout)
        settings: dict[str, Any] = {"crop": "random", "flip": 0.3}
        found = created(size=size, resize=12, layout=layout, pad=pad, pad_mode="reflect", **settings)(batch)[0]
        padded = v2.functional.pad(IMAGES, [pad] * 4, padding_mode="reflect").numpy()
        expected = [
            normalised(reference(image, word, size, 0, 0.3, "random"))
            for image, word in zip(padded, keys_of(len(IMAGES)), strict=True)
        ]
        assert np.array_equal(found.numpy(), np.stack(expected))

    def test_every_offset_is_reached_equally_often(self) -> None:
        count = 6000
        positions = torch.arange(144, dtype=torch.uint8).view(1, 1, 12, 12)  # a pixel's value says where it was
        batch = {"images": positions.expand(count, 1, 12, 12), "labels": torch.zeros(count).long()}
        batch |= {"keys": keys_of(count), "weights": torch.ones(count)}
        found = created(size=8, grey=True, resize=12, crop="random", flip=0.5)(batch)[0].long()
        mirrored = found[:, 0, 0, 0] > found[:, 0, 0, 7]
        corner = torch.where(mirrored, found[:, 0, 0, 7], found[:, 0, 0, 0])
        counts = torch.bincount(torch.div(corner, 12, rounding_mode="floor") * 5 + corner % 12, minlength=25)
        expected = count / 25
        assert len(counts) == 25
        assert (counts - expected).abs().max() < 5 * math.sqrt(expected)
        assert abs(int(mirrored.sum()) - count / 2) < 5 * math.sqrt(count / 4)


class TestResize:
    def test_a_batch_is_resized_as_torch_resizes_one_image(self) -> None:
        found = created(size=16, training=False, resize=20)(batch_of(slice(40)))[0]
        for image, one in zip(found, IMAGES, strict=False):
            larger = F.interpolate(one[None].float(), (20, 20), mode="bilinear", antialias=True)[0, :, 2:18, 2:18]
            assert np.array_equal(image.numpy(), normalised(larger.numpy()))


class TestErase:
    def test_one_rectangle_is_erased_as_often_as_asked_and_anywhere(self) -> None:
        count, size = 4000, 32
        images = torch.full((count, 3, size, size), 255, dtype=torch.uint8)
        batch = {"images": images, "labels": torch.zeros(count).long()}
        batch |= {"keys": keys_of(count), "weights": torch.ones(count)}
        found = created(size=size, erase=0.25)(batch)[0]
        erased = (found == 0).all(1)
        assert torch.equal(erased, (found == 0).any(1))  # all channels alike
        hit = erased.flatten(1).any(1)
        assert abs(int(hit.sum()) - count / 4) < 5 * math.sqrt(count * 0.25 * 0.75)
        rows, columns = erased[hit].any(2), erased[hit].any(1)
        heights, widths = rows.sum(1), columns.sum(1)
        assert torch.equal(erased[hit].flatten(1).sum(1), heights * widths)  # one filled rectangle
        for sides in (rows, columns):  # in one piece
            assert int((sides[:, 1:] & ~sides[:, :-1]).sum(1).add(sides[:, 0]).max()) == 1
        assert rows.any(0).all() and columns.any(0).all()  # and anywhere

    def test_a_colour_of_each_box_or_of_each_pixel(self) -> None:
        """As timm's random erasing."""
        count, size = 300, 32
        batch = {"images": torch.full((count, 3, size, size), 255, dtype=torch.uint8)}
        batch |= {"labels": torch.zeros(count).long(), "keys": keys_of(count), "weights": torch.ones(count)}
        whole = created(size=size)(batch)[0]
        plain, colours, pixels = (
            created(size=size, erase=0.7, erase_mode=mode)(batch)[0] for mode in ("const", "rand", "pixel")
        )
        holes = plain == 0
        for found in (colours, pixels):
            assert torch.equal(found == whole, ~holes)  # in the same places
        of_boxes = []
        for image, hole in zip(colours, holes, strict=True):
            if hole.any():
                of_boxes += [channel[inside].unique() for channel, inside in zip(image, hole, strict=True)]
        assert len(of_boxes) == pytest.approx(3 * 0.7 * count, abs=3 * 40)
        drawn = torch.cat(of_boxes)
        assert len(drawn) == len(of_boxes) < 1.1 * len(drawn.unique())  # one for each channel of each box
        assert kstest(drawn.numpy(), "norm").pvalue > 1e-4 and kstest(pixels[holes].numpy()[::7], "norm").pvalue > 1e-4

    def test_never_and_always(self) -> None:
        plain = created()(batch_of())[0]
        assert torch.equal(created(erase=1e-9)(batch_of())[0], plain)
        assert (created(erase=1.0)(batch_of())[0] != plain).flatten(1).any(1).all()


class TestMixing:
    @pytest.mark.parametrize("mixing", [{"mixup": 0.4}, {"cutmix": 1.0}])
    def test_a_sample_beside_padding_stays_as_it_is(self, mixing: dict) -> None:
        batch = batch_of(slice(10), padding=3)
        plain = created()(batch)[0]
        found, targets = created(**mixing)(batch)
        assert torch.equal(found[6:], plain[6:])  # the seventh is the last real one, and its neighbour is padding
        assert torch.equal(targets[6:], F.one_hot(LABELS[6:10], CLASSES).float())
        assert not torch.equal(found[:6], plain[:6])

    @pytest.mark.parametrize("alpha", [0.1, 0.2, 0.8, 1.0, 3.0])
    def test_shares_have_the_beta_distribution(self, alpha: float) -> None:
        quantiles = beta_quantiles(alpha)
        assert quantiles[0] == 0 and quantiles[-1] == 1 and bool((quantiles.diff() >= 0).all())
        count = 20_000
        images = torch.tensor([0, 255], dtype=torch.uint8).repeat(count).view(-1, 1, 1, 1)
        labels = torch.tensor([0, 1]).repeat(count)
        batch = {"images": images, "labels": labels, "keys": keys_of(2 * count), "weights": torch.ones(2 * count)}
        share = created(size=1, grey=True, mixup=alpha)(batch)[1][::2, 0].double()
        inner = share[(share > 1e-4) & (share < 1 - 1e-4)].numpy()  # in float32 the tails have lumps
        edge = beta(alpha, alpha).cdf(1e-4)
        assert abs(len(inner) - count * (1 - 2 * edge)) < 5 * math.sqrt(count * edge) + 5

        def cdf(x: np.ndarray) -> np.ndarray:
            return (beta(alpha, alpha).cdf(x) - edge) / (1 - 2 * edge)

        assert kstest(inner, cdf).pvalue > 1e-6
