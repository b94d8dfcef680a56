"""optim/performance.py: a convolution that leaves out what sees only padding is the same function."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import nn

from accel_train.config.schema import Model
from accel_train.models import create_model
from accel_train.optim.performance import PaddingAwareConv2d, use_padding_aware_convolutions

SIDES = st.tuples(st.integers(1, 6), st.integers(1, 6))


def outcome(model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """What comes out, and all gradients."""
    images = images.clone().requires_grad_()
    found = model(images)
    (found * torch.arange(found.numel(), dtype=torch.float64).view(found.shape)).sum().backward()
    gradients = [parameter.grad for parameter in (*model.parameters(), images)]
    return [found.detach(), *(gradient for gradient in gradients if gradient is not None)]


@example((1, 1), (1, 1), (3, 3), (1, 1), 1, False)  # no tap sees any pixel
@given(SIDES, SIDES, st.tuples(st.integers(1, 3), st.integers(1, 3)), SIDES, st.sampled_from([1, 2]), st.booleans())
def test_it_is_the_same_function(
    sides: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    groups: int,
    bias: bool,
) -> None:
    assume(all(side + 2 * pad >= size for side, pad, size in zip(sides, padding, kernel, strict=True)))
    torch.manual_seed(0)
    plain = nn.Conv2d(2, 4, kernel, stride, padding, groups=groups, bias=bias).double()
    aware = copy.deepcopy(plain)
    use_padding_aware_convolutions(aware)
    assert type(aware) is PaddingAwareConv2d
    images = torch.randn(3, 2, *sides, dtype=torch.float64)
    for one, other in zip(outcome(plain, images), outcome(aware, images), strict=True):
        torch.testing.assert_close(one, other)


def test_the_taps_that_see_only_padding_get_no_gradient_and_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    aware = nn.Conv2d(2, 2, 3, padding=1)
    use_padding_aware_convolutions(aware)
    shapes = []
    convolve = torch.nn.functional.conv2d

    def noted(images: torch.Tensor, weight: torch.Tensor, *others: object, **more: Any) -> torch.Tensor:
        shapes.append(tuple(weight.shape[2:]))
        return convolve(images, weight, *others, **more)  # type: ignore[arg-type, call-overload]

    monkeypatch.setattr("accel_train.optim.performance.F.conv2d", noted)
    for size in (1, 2, 3):
        aware(torch.ones(1, 2, size, size))
    assert shapes == [(1, 1), (3, 3), (3, 3)]
    aware.zero_grad()
    aware(torch.ones(1, 2, 1, 1)).sum().backward()
    assert aware.weight.grad is not None
    assert aware.weight.grad.is_contiguous()
    assert aware.weight.grad.count_nonzero() == 4 and bool((aware.weight.grad[:, :, 1, 1] == 1).all())


def test_names_and_weights_of_a_net_stay() -> None:
    net = create_model(Model(name="torchvision/resnet18"), num_classes=10, channels=3, image_size=32)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    use_padding_aware_convolutions(net)
    after = net.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    "other",
    [nn.Conv2d(2, 2, 3, padding="same"), nn.Conv2d(2, 2, 3, padding_mode="reflect"), nn.Conv2d(2, 2, 3, dilation=2)],
)
def test_others_stay_as_they_are(other: nn.Conv2d) -> None:
    use_padding_aware_convolutions(other)
    assert type(other) is nn.Conv2d
