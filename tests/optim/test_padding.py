"""optim/performance.py: a convolution that leaves out what sees only padding is the same function."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import nn

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


@pytest.mark.parametrize(
    "other",
    [nn.Conv2d(2, 2, 3, padding="same"), nn.Conv2d(2, 2, 3, padding_mode="reflect"), nn.Conv2d(2, 2, 3, dilation=2)],
)
def test_others_stay_as_they_are(other: nn.Conv2d) -> None:
    use_padding_aware_convolutions(other)
    assert type(other) is nn.Conv2d
