"""Normalises several virtual batches, each by its own statistics, forward and backward.

On a GPU kernels of our own do this, if they work there (fused.py). Elsewhere operators mostly see all virtual batches
together, as a dimension: their number does not depend on that of the virtual batches.

Only large activations on a CPU, where each operator would read them from memory again, are given to torch's kernel, a
virtual batch a call. Its threads would wait for each other at each call, and for the slowest, which a data worker may
have pushed off its core. So whole virtual batches are given to threads here, the next one to the thread that is ready
first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SMALL = 1 << 21
"""Values that a CPU's cache keeps from one operator to the next. To call torch's kernel for each virtual batch costs
0.7 ms a layer, more than composed operators take for so few values."""


def is_fused(values: Tensor) -> bool:
    """Whether the kernels of fused.py can normalise `values`. The first call on a device tries them there."""
    kinds = torch.float32, torch.bfloat16, torch.float16
    return values.device.type == "cuda" and values.dtype in kinds and not why_not_fused(values.device)


@functools.cache
def why_not_fused(device: torch.device) -> str:
    """Why the kernels of fused.py cannot be used on a GPU; "" if they give what `Together` gives.

    Triton compiles them at their first call. It needs a C compiler and supports some GPUs only.
    """
    try:
        from accel_train.models.batchnorm.fused import Fused

        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            for kind in (torch.float32, torch.bfloat16):
                values = torch.linspace(9, 11, 24 * 6 * 15, device=device).view(24, 6, 3, 5).sin().to(kind)
                for layout in (torch.contiguous_format, torch.channels_last):
                    values = values.contiguous(memory_format=layout).detach().requires_grad_()
                    weight, bias = torch.linspace(1, 2, 12, device=device).view(2, 6).requires_grad_()
                    statistics = torch.zeros(6, 2, 6, device=device)
                    expected, means, variances = Together.apply(values, 4, weight, bias, 1e-5)
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
    kernel = TorchsKernel if values.device.type == "cpu" and values.numel() > SMALL else Together
    return kernel.apply(values, rows, weight, bias, eps)  # type: ignore[no-any-return]


class Together(torch.autograd.Function):
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
        of_bias, of_weight = sums.sum(1).flatten(1)
        of_values = None
        if ctx.needs_input_grad[0]:
            constant, slope = sums * (scale * (-1 / ctx.count))
            slope = slope * inverse
            rest = torch.addcmul(torch.addcmul(constant, slope, mean, value=-1), groups, slope)
            of_values = torch.empty_like(values)
            torch.addcmul(rest, gradients, scale, out=_grouped(of_values, ctx.rows))
        found = zip(ctx.kinds, (of_weight, of_bias), strict=True)
        of_weight, of_bias = (None if kind is None else each.to(kind) for kind, each in found)
        return of_values, None, of_weight, of_bias, None


class TorchsKernel(torch.autograd.Function):
    """torch's kernel for each virtual batch, in as many threads as the calling one may use."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, rows: int, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, channels = len(values) // rows, values.shape[1]
        kind = torch.promote_types(values.dtype, torch.float32) if weight is None else weight.dtype
        means, variances, saved_means, inverses = torch.zeros(4, count, channels, dtype=kind)
        normalised = torch.empty_like(values)

        def call(part: Tensor, of_part: Tensor, mean: Tensor, variance: Tensor, *saved: Tensor) -> None:
            # With momentum 1 the kernel writes its statistics over the zeros.
            results = {"out": of_part, "save_mean": saved[0], "save_invstd": saved[1]}
            torch.ops.aten.native_batch_norm.out(part, weight, bias, mean, variance, True, 1.0, eps, **results)

        _side_by_side(
            call, torch.split(values, rows), torch.split(normalised, rows), means, variances, saved_means, inverses
        )
        ctx.save_for_backward(values, weight, saved_means, inverses)
        ctx.rows, ctx.eps = rows, eps
        ctx.mark_non_differentiable(means, variances)
        return normalised, means, variances

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, means, inverses = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[number] for number in (0, 2, 3)]
        of_values = torch.empty_like(values) if wanted[0] else None
        sums = torch.empty(2, *means.shape, dtype=means.dtype)  # of weight and bias

        def call(number: int, part: Tensor, of_part: Tensor, mean: Tensor, inverse: Tensor) -> None:
            found = torch.ops.aten.native_batch_norm_backward(
                of_part, part, weight, None, None, mean, inverse, True, ctx.eps, wanted
            )
            for target, result in zip((parts_of_values[number], *sums[:, number]), found, strict=True):
                if result is not None:
                    target.copy_(result)

        parts = torch.split(values, ctx.rows)
        parts_of_values = parts if of_values is None else torch.split(of_values, ctx.rows)
        _side_by_side(call, range(len(parts)), parts, torch.split(gradient, ctx.rows), means, inverses)
        of_weight, of_bias = (
            each.sum(0) if is_wanted else None for each, is_wanted in zip(sums, wanted[1:], strict=True)
        )
        return of_values, None, of_weight, of_bias, None


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


def _side_by_side(call: Callable[..., None], *arguments: Any) -> None:
    """`call` once for each virtual batch, with its element of each of `arguments`."""
    calls = list(zip(*arguments, strict=True))
    threads = min(torch.get_num_threads(), len(calls))
    if threads == 1:
        for each in calls:
            call(*each)
        return
    numbers = itertools.count()  # drawn by all threads: one that gets less of its core does less

    @torch.no_grad()  # which is a setting of each thread
    def work() -> None:
        while (number := next(numbers)) < len(calls):
            call(*calls[number])

    pool = _pool(threads, torch.get_num_threads() // threads)
    done = [pool.submit(work) for _ in range(threads)]
    for thread in done:
        thread.result()


@functools.cache
def _pool(threads: int, threads_of_each: int) -> ThreadPoolExecutor:
    def begin() -> None:
        torch.set_num_threads(threads_of_each)
        torch.get_num_threads()  # a thread that asks for the first time takes the number that any thread has set last

    return ThreadPoolExecutor(threads, "batchnorm", begin)
