"""Random erasing with colours, as timm's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import kstest

from accel_train.config.schema import Augment
from accel_train.data.transforms.batch import BatchTransform
from accel_train.keyed import hashed

SIZE, COUNT = 32, 300
KEYS = hashed(11, torch.arange(COUNT))


def erased(which: slice = slice(None), layout: torch.memory_format = torch.contiguous_format, **augment: Any) -> Any:
    """Grey images, of which what is not erased is 5."""
    transform = BatchTransform(
        Augment(**augment), size=SIZE, mean=(0.0,) * 3, std=(0.2,) * 3, num_classes=2, training=True, per_image=False,
        device=torch.device("cpu"), memory_format=layout,
    )  # fmt: skip
    keys = KEYS[which]
    images = torch.full((len(keys), 3, SIZE, SIZE), 255, dtype=torch.uint8)
    assert transform.draw_parameters is not None
    parameters = transform.draw_parameters(keys, torch.ones(len(keys)))
    batch = {"images": images, "labels": torch.zeros(len(keys), dtype=torch.int64), "keys": keys}
    return transform({**batch, "parameters": parameters})[0]


def test_a_colour_of_each_box_or_of_each_pixel() -> None:
    plain, colours, pixels = (erased(erase=0.7, erase_mode=mode) for mode in ("const", "rand", "pixel"))
    holes = plain == 0
    for found in (colours, pixels):
        assert torch.equal(found == 5, ~holes)  # in the same places
    for image, hole in zip(colours, holes, strict=True):
        assert all(len(channel[inside].unique()) <= 1 for channel, inside in zip(image, hole, strict=True))
    assert kstest(pixels[holes].numpy()[::7], "norm").pvalue > 1e-4
    of_boxes = torch.stack([image[:, hole[0]][:, 0] for image, hole in zip(colours, holes, strict=True) if hole.any()])
    assert len(of_boxes) == pytest.approx(0.7 * COUNT, abs=40)
    assert kstest(of_boxes.flatten().numpy(), "norm").pvalue > 1e-4 and len(of_boxes.unique()) > 2 * len(of_boxes)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
def test_it_is_the_same_in_any_batch(mode: str) -> None:
    options: dict[str, Any] = {"erase": 0.5, "erase_mode": mode, "cutmix": 1.0}
    for layout in (torch.contiguous_format, torch.channels_last):
        whole = erased(layout=layout, **options)
        parts = [erased(slice(start, start + 6), layout, **options) for start in range(0, COUNT, 6)]
        assert torch.equal(torch.cat(parts), whole)
