"""The two ways to normalise several virtual batches: both give what torch's BatchNorm gives for each by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train.models.batchnorm_kernels import ComposedBatchNorm, NativeBatchNorm

WAYS = ComposedBatchNorm, NativeBatchNorm
COUNT, ROWS, CHANNELS = 5, 4, 6
Results = list[Tensor]


def results(way: type[torch.autograd.Function] | None, values: Tensor, *, affine: bool = True) -> Results:
    """Output, means, variances and gradients; `way` None: of torch's BatchNorm, in float64."""
    torch.manual_seed(1)
    kind = torch.float64 if way is None else values.dtype
    gradient = torch.randn(values.shape).to(values.dtype).to(kind)
    values = values.detach().to(kind).requires_grad_()
    weights = torch.promote_types(kind, torch.float32)
    weight, bias = (torch.randn(CHANNELS, dtype=weights, requires_grad=True) if affine else None for _ in range(2))
    if way is None:
        means, variances = torch.zeros(2, COUNT, CHANNELS, dtype=kind)
        parts = zip(values.split(ROWS), means, variances, strict=True)
        output = torch.cat([F.batch_norm(each, m, v, weight, bias, True, 1.0, 1e-5) for each, m, v in parts])
    else:
        output, means, variances = way.apply(values, ROWS, weight, bias, 1e-5)
    output.backward(gradient)
    found = [output, means, variances, values.grad, *(each.grad for each in (weight, bias) if each is not None)]
    return [each.detach() for each in found if each is not None]


SHAPES = [(), (7,), (5, 3), (1, 1), (2, 3, 4)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_virtual_batch_is_torchs(way: type, shape: tuple[int, ...], affine: bool) -> None:
    values = torch.randn(COUNT * ROWS, CHANNELS, *shape, dtype=torch.float64)
    layouts = [values, values.to(memory_format=torch.channels_last)] if len(shape) == 2 else [values]
    for each in layouts:
        expected = results(None, each, affine=affine)
        found = results(way, each, affine=affine)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
        assert found[0].stride() == each.stride() and found[3].stride() == each.stride()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_the_statistics_of_half_precision_are_float32(way: type, kind: torch.dtype) -> None:
    """Only the output and the gradient of the values are rounded to the precision of the values."""
    values = (100 + torch.randn(COUNT * ROWS, CHANNELS, 5, 3)).to(kind)
    expected = results(None, values)
    output, means, variances, of_values, of_weight, of_bias = results(way, values)
    assert (output.dtype, of_values.dtype, means.dtype, of_weight.dtype) == (kind, kind, *[torch.float32] * 2)
    for one, other in (
        (means, expected[1]),
        (variances, expected[2]),
        (of_weight, expected[4]),
        (of_bias, expected[5]),
    ):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
    for one, other in ((output, expected[0]), (of_values, expected[3])):
        torch.testing.assert_close(one.double(), other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("way", WAYS)
def test_a_large_mean_costs_no_more_than_in_torchs_own(way: type) -> None:
    values = 1000 + torch.randn(COUNT * ROWS, CHANNELS, 32, 32)
    exact = results(None, values)
    means, variances = torch.zeros(2, COUNT, CHANNELS)
    for each, mean, variance in zip(values.split(ROWS), means, variances, strict=True):
        F.batch_norm(each, mean, variance, None, None, True, 1.0, 1e-5)
    error = (variances - exact[2]).abs().max()
    found = results(way, values)
    assert (found[2] - exact[2]).abs().max() <= 1.5 * error + 1e-6
    for one, other in zip(found, exact, strict=True):
        assert (one - other).norm() <= 1e-3 * other.norm()


@pytest.mark.parametrize("way", WAYS)
def test_what_needs_no_gradient_gets_none(way: type) -> None:
    values = torch.randn(COUNT * ROWS, CHANNELS, 3)
    weight = torch.ones(CHANNELS, requires_grad=True)
    way.apply(values, ROWS, weight, torch.zeros(CHANNELS), 1e-5)[0].sum().backward()  # type: ignore[attr-defined]
    assert weight.grad is not None and values.grad is None
    frozen = values.clone().requires_grad_()
    way.apply(frozen, ROWS, weight.detach(), None, 1e-5)[0].square().sum().backward()  # type: ignore[attr-defined]
    assert frozen.grad is not None
