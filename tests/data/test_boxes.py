"""Boxes of CutMix and of random erasing have the distributions of the papers, and those of torchvision's transforms.

Both are drawn again here, by other code and with other random numbers, and compared by Kolmogorov-Smirnov tests.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.stats import ks_2samp
from timm.data.mixup import rand_bbox
from torchvision.transforms import v2

from accel_train.config.schema import Augment
from accel_train.data.batch_transform import DRAWS, AugmentParameters, Column, _interpolate, beta_quantiles
from accel_train.keyed import hashed, key, uniforms

SIZE, COUNT = 224, 4000
Boxes = npt.NDArray[np.float64]
"""[n, 4]: first row, first column, and the row and column after the last."""


def drawn(**augment: float) -> torch.Tensor:
    """The parameters, int32 [n, columns], of 4000 pairs of samples: those of each pair's first one."""
    keys = hashed(key(7, 0, "augment"), torch.arange(2 * COUNT))
    return AugmentParameters(Augment(**augment), SIZE, per_image=False)(keys, torch.ones(2 * COUNT))[::2]  # type: ignore[arg-type]


def boxes_of(parameters: torch.Tensor, number: int) -> Boxes:
    """The erased (0) or the pasted (1) boxes."""
    first, last = (
        parameters[:, column + 2 * number : column + 2 * number + 2].double().numpy()
        for column in (int(Column.FIRST), int(Column.LAST))
    )
    return np.concatenate([first, np.maximum(last + 1, first)], 1)


def assert_same_distribution(found: Boxes, expected: Boxes) -> None:
    """Of rows and columns, each alone and together: the boxes may not lie on the diagonal, for example."""
    for figure in (
        lambda box: box[:, 0],
        lambda box: box[:, 1],
        lambda box: box[:, 2],
        lambda box: box[:, 3],
        lambda box: box[:, 0] - box[:, 1],
        lambda box: (box[:, 2] - box[:, 0]) - (box[:, 3] - box[:, 1]),
        lambda box: (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1]),
    ):
        assert ks_2samp(figure(found).round(), figure(expected).round()).pvalue > 1e-6


def share_of(parameters: torch.Tensor) -> torch.Tensor:
    return parameters[:, Column.SHARE].view(torch.float32)


@pytest.mark.parametrize("alpha", [0.3, 1.0, 3.0])
def test_cutmix_is_the_papers(alpha: float) -> None:
    """Yun et al. 2019 (arxiv.org/abs/1905.04899), equation 2: lambda from Beta(alpha, alpha), the centre of the box
    uniform over the image, both sides sqrt(1 - lambda) of the image's; what is outside is cut off."""
    generator = np.random.default_rng(0)
    centre = generator.uniform(0, SIZE, (COUNT, 2))
    half = np.sqrt(1 - generator.beta(alpha, alpha, (COUNT, 1))) * SIZE / 2
    expected = np.concatenate([centre - half, centre + half], 1).clip(0, SIZE)
    parameters = drawn(cutmix=alpha)
    found = boxes_of(parameters, 1)
    assert_same_distribution(found, expected)
    areas = (found[:, 2] - found[:, 0]) * (found[:, 3] - found[:, 1]) / SIZE**2
    assert np.allclose(share_of(parameters).numpy(), 1 - areas, atol=1e-6)


def test_cutmix_is_timms_in_small_images_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm's rand_bbox for the same share and centre: in 32 pixels a rounded side would make boxes 4 % larger."""
    size, keys = 32, hashed(key(7, 0, "augment"), torch.arange(COUNT))
    parameters = AugmentParameters(Augment(cutmix=1.0, mix_mode="elem"), size, per_image=False)
    draws = uniforms(keys, DRAWS)
    centres = iter((draws[3:] * size).floor().int().T.flatten().tolist())
    monkeypatch.setattr(np.random, "randint", lambda *_, **__: next(centres))
    found = boxes_of(parameters(keys, torch.ones(COUNT)), 1).astype(int)[:, [0, 2, 1, 3]].tolist()
    for number, share in enumerate(_interpolate(beta_quantiles(1.0), draws[2]).tolist()):
        expected = rand_bbox((size, size), share)
        if expected[0] < expected[1] and expected[2] < expected[3]:
            assert tuple(found[number]) == expected


def test_whether_to_mix_and_how_are_drawn_apart() -> None:
    parameters = drawn(mixup=1.0, cutmix=1.0, mix_probability=0.5)
    mixed = share_of(parameters) < 1
    cut = parameters[mixed, Column.CUT].double()
    assert abs(float(mixed.double().mean()) - 0.5) < 5 * math.sqrt(0.25 / COUNT)
    assert abs(float(cut.mean()) - 0.5) < 5 * math.sqrt(0.25 / len(cut))


def test_erased_boxes_are_torchvisions() -> None:
    """Zhong et al. 2020 (arxiv.org/abs/1708.04896): the area uniform from 2 to 33 %, the ratio in its logarithm."""
    transform = v2.RandomErasing(p=1.0, scale=(0.02, 0.33), ratio=(0.3, 1 / 0.3))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawings = [transform.make_params([torch.empty(3, SIZE, SIZE)]) for _ in range(COUNT)]
    corners = np.array([[drawing[name] for name in ("i", "j")] for drawing in drawings], float)
    sides = np.array([[drawing[name] for name in ("h", "w")] for drawing in drawings], float)
    assert_same_distribution(boxes_of(drawn(erase=1.0), 0), np.concatenate([corners, corners + sides], 1))
