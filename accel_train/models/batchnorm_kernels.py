"""Normalises several virtual batches, each by its own statistics, forward and backward.

On a GPU kernels of our own do this, if they work there (batchnorm_triton.py). Elsewhere operators mostly see all
virtual batches together, as a dimension: their number does not depend on that of the virtual batches.

Only large activations on a CPU, where each operator would read them from memory again, are given to torch's kernel, a
virtual batch a call.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SMALL = 1 << 21
"""Values that a CPU's cache keeps from one operator to the next. To call torch's kernel for each virtual batch costs
0.7 ms a layer, more than composed operators take for so few values."""


def is_fused(values: Tensor) -> bool:
    """Whether batchnorm_triton.py can normalise `values`. The first call on a device tries its kernels there."""
    kinds = torch.float32, torch.bfloat16, torch.float16
    return values.device.type == "cuda" and values.dtype in kinds and not why_not_fused(values.device)


@functools.cache
def why_not_fused(device: torch.device) -> str:
    """Why the kernels of batchnorm_triton.py cannot be used on a GPU; "" if they give what `ComposedBatchNorm` gives.

    Triton compiles them at their first call. It needs a C compiler and supports some GPUs only.
    """
    try:
        from accel_train.models.batchnorm_triton import Fused

        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            for kind in (torch.float32, torch.bfloat16):
                values = torch.linspace(9, 11, 24 * 6 * 15, device=device).view(24, 6, 3, 5).sin().to(kind)
                for layout in (torch.contiguous_format, torch.channels_last):
                    values = values.contiguous(memory_format=layout).detach().requires_grad_()
                    weight, bias = torch.linspace(1, 2, 12, device=device).view(2, 6).requires_grad_()
                    statistics = torch.zeros(6, 2, 6, device=device)
                    expected, means, variances = ComposedBatchNorm.apply(values, 4, weight, bias, 1e-5)
                    found = [Fused.apply(values, 4, weight, bias, 1e-5, statistics), *statistics.unbind(1)]
                    for one, other in zip(found, (expected, means, variances), strict=True):
                        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
                    inputs = values, weight, bias
                    gradients = [torch.autograd.grad(each, inputs, values.detach()) for each in (found[0], expected)]
                    for one, other in zip(*gradients, strict=True):
                        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        return ""
    except Exception as error:  # of the import, of the compiler, of the driver, or wrong values
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def normalise(
    values: Tensor, rows: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """BatchNorm of each `rows` of `values` [n, channels, ...], with at least two values a channel.

    Returns the normalised values, and the means and unbiased variances, [virtual batches, channels].
    """
    kernel = NativeBatchNorm if values.device.type == "cpu" and values.numel() > SMALL else ComposedBatchNorm
    return kernel.apply(values, rows, weight, bias, eps)  # type: ignore[no-any-return]


class ComposedBatchNorm(torch.autograd.Function):
    """Composed of operators on [virtual batches, rows, channels, ...]. Means are float32, whatever the values are.

    The gradients are those of Ioffe and Szegedy 2015 (arxiv.org/abs/1502.03167), section 3.
    """

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, rows: int, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups = _grouped(values, rows)
        summed = (1, *range(3, groups.ndim))
        count = rows * values[0, 0].numel()
        with torch.autocast(values.device.type, enabled=False):
            kind = torch.promote_types(values.dtype, torch.float32)
            variance, mean = _var_mean(groups.to(kind), summed, count)
            inverse = torch.add(torch.tensor(eps, dtype=kind), variance, alpha=(count - 1) / count).rsqrt_()
            scale = inverse if weight is None else inverse * per_channel(weight, groups)
            shift = -mean * scale if bias is None else torch.addcmul(per_channel(bias, groups), mean, scale, value=-1)
            normalised = torch.empty_like(values)
            torch.addcmul(shift, groups, scale, out=_grouped(normalised, rows))
        ctx.save_for_backward(values, mean, inverse, scale)
        ctx.rows, ctx.summed, ctx.count = rows, summed, count
        ctx.kinds = [None if each is None else each.dtype for each in (weight, bias)]
        statistics = mean.flatten(1), variance.flatten(1)
        ctx.mark_non_differentiable(*statistics)
        return normalised, *statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        values, mean, inverse, scale = ctx.saved_tensors
        groups, gradients = (_grouped(each, ctx.rows) for each in (values, gradient))
        # Of the gradients, and of their products with the normalised values.
        sums = mean.new_empty(2, *mean.shape)
        torch.sum(gradients, ctx.summed, keepdim=True, dtype=mean.dtype, out=sums[0])
        torch.sum((groups - mean).mul_(gradients), ctx.summed, keepdim=True, out=sums[1])
        sums[1].mul_(inverse)
        bias_gradient, weight_gradient = sums.sum(1).flatten(1)
        values_gradient = None
        if ctx.needs_input_grad[0]:
            constant, slope = sums * (scale * (-1 / ctx.count))
            slope = slope * inverse
            rest = torch.addcmul(torch.addcmul(constant, slope, mean, value=-1), groups, slope)
            values_gradient = torch.empty_like(values)
            torch.addcmul(rest, gradients, scale, out=_grouped(values_gradient, ctx.rows))
        pairs = zip(ctx.kinds, (weight_gradient, bias_gradient), strict=True)
        weight_gradient, bias_gradient = (None if kind is None else each.to(kind) for kind, each in pairs)
        return values_gradient, None, weight_gradient, bias_gradient, None


class NativeBatchNorm(torch.autograd.Function):
    """torch's kernel for each virtual batch."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, rows: int, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, channels = len(values) // rows, values.shape[1]
        kind = torch.promote_types(values.dtype, torch.float32) if weight is None else weight.dtype
        means, variances, saved_means, inverses = torch.zeros(4, count, channels, dtype=kind)
        normalised = torch.empty_like(values)
        statistics = zip(means, variances, saved_means, inverses, strict=True)
        parts = zip(torch.split(values, rows), torch.split(normalised, rows), statistics, strict=True)
        for part, out, (mean, variance, saved_mean, inverse) in parts:
            # With momentum 1 the kernel writes its statistics over the zeros.
            results = {"out": out, "save_mean": saved_mean, "save_invstd": inverse}
            torch.ops.aten.native_batch_norm.out(part, weight, bias, mean, variance, True, 1.0, eps, **results)
        ctx.save_for_backward(values, weight, saved_means, inverses)
        ctx.rows, ctx.eps = rows, eps
        ctx.mark_non_differentiable(means, variances)
        return normalised, means, variances

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, means, inverses = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[number] for number in (0, 2, 3)]
        values_gradient = torch.empty_like(values) if wanted[0] else None
        sums = torch.empty(2, *means.shape, dtype=means.dtype)  # the gradients of weight and bias, of each part
        parts = zip(torch.split(gradient, ctx.rows), torch.split(values, ctx.rows), means, inverses, strict=True)
        for number, (part_gradient, part, mean, inverse) in enumerate(parts):
            part_results = torch.ops.aten.native_batch_norm_backward(
                part_gradient, part, weight, None, None, mean, inverse, True, ctx.eps, wanted
            )
            if values_gradient is not None:
                values_gradient[number * ctx.rows : (number + 1) * ctx.rows].copy_(part_results[0])
            for target, result in zip(sums[:, number], part_results[1:], strict=True):
                if result is not None:
                    target.copy_(result)
        weight_gradient, bias_gradient = (
            each.sum(0) if is_wanted else None for each, is_wanted in zip(sums, wanted[1:], strict=True)
        )
        return values_gradient, None, weight_gradient, bias_gradient, None


def _grouped(values: Tensor, rows: int) -> Tensor:
    return values.view(-1, rows, *values.shape[1:])


def _var_mean(groups: Tensor, summed: tuple[int, ...], count: int) -> tuple[Tensor, Tensor]:
    """The unbiased variances and the means over the dimensions `summed`, which have `count` values."""
    if groups.device.type != "cpu":
        return torch.var_mean(groups, summed, keepdim=True)
    mean = groups.mean(summed, keepdim=True)  # var_mean takes five times as long there
    return (groups - mean).square_().sum(summed, keepdim=True).div_(count - 1), mean


def per_channel(vector: Tensor, groups: Tensor) -> Tensor:
    """`vector` in the shape of the statistics of `groups` [virtual batches, rows, channels, ...]."""
    return vector.view(1, 1, -1, *[1] * (groups.ndim - 3))
