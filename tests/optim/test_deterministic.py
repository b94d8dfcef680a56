"""Adaptive pooling of deterministic kernels has the values and gradients of torch's."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accel_train.config.schema import Config
from accel_train.optim.bitwise import REPLACED, use_deterministic_layers

SIDES = st.integers(1, 14)
SIZES = st.one_of(SIDES, st.tuples(st.none() | SIDES, st.none() | SIDES))


@given(SIDES, SIDES, SIZES, st.sampled_from(list(REPLACED)), st.booleans())
def test_values_and_gradients(height: int, width: int, size: object, kind: type[nn.Module], batched: bool) -> None:
    shape = (2, 3, height, width) if batched else (3, height, width)
    generator = torch.Generator().manual_seed(height * 100 + width)
    one = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    other = one.detach().clone().requires_grad_()
    expected, found = kind(size)(one), REPLACED[kind](size)(other)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    torch.testing.assert_close(other.grad, one.grad)


def test_on_a_cpu_nothing_is_replaced() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(3))
    use_deterministic_layers(Config(bitwise=True), model, 3, 16)
    assert type(model[1]) is nn.AdaptiveAvgPool2d
