"""Normalises several virtual batches on a GPU with two kernels forward and two backward, written in Triton.

They pass over the values as often as those of torch's own BatchNorm: once for their sums, once to normalise them. Each
virtual batch is cut into pieces, a program for each piece and some channels. The first kernel writes the sums of each
piece, and each program of the second adds those of its virtual batch, always in the same order. The formulas are those
of Ioffe and Szegedy 2015 (arxiv.org/abs/1502.03167), section 3; means and variances of pieces are joined as Chan, Golub
and LeVeque 1979 do, because sums of squares would lose the variance of values with a large mean.

Triton comes with torch's CUDA and ROCm builds. batchnorm_kernels.py uses this file only where it has given the right
values.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: N803 (constants of a compiled kernel are in capitals, as in Triton's own)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

PROGRAMS = 1024  # wanted, so that each multiprocessor of a large GPU has several
TILE = 2048  # values that a program has in registers at once
CHANNELS = 64  # of a program, at most
NUMBERS = ["values", "spatial", "piece", "channels", "xn", "xs", "gn", "gs", "yn", "ys"]  # no kernel for each of these


class Fused(torch.autograd.Function):
    """BatchNorm of each `rows` of `values` [n, channels, ...] of float32 or half precision, on a GPU.

    Means and unbiased variances are written to `statistics` [virtual batches, 2 or more, channels], float32, if given.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        rows: int,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        statistics: Tensor | None,
    ) -> Tensor:
        normalised = torch.empty_like(values)
        x, y = _flat(values), _flat(normalised)
        grid, sizes = _division(x, rows)
        pieces = torch.empty(grid[0], grid[1], 2, x.shape[1], device=x.device)
        saved = torch.empty(grid[0], 2, x.shape[1], device=x.device)  # means, and reciprocals of standard deviations
        launch(_sum_values, grid, x, pieces, *x.stride(), **sizes)
        kept = saved if statistics is None else statistics
        optional = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "KEEPS": statistics is not None}
        w, b = (saved if each is None else each for each in (weight, bias))  # any pointer in place of none
        arguments = (x, y, pieces, saved, kept, w, b, eps, kept.stride(0), kept.stride(1), *x.stride(), *y.stride())
        launch(_normalise, grid, *arguments, **optional, **sizes)
        ctx.save_for_backward(values, weight, saved)
        ctx.rows, ctx.kinds = rows, [None if each is None else each.dtype for each in (weight, bias)]
        return normalised

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, saved = ctx.saved_tensors
        of_values = torch.empty_like(values)
        x, g, y = _flat(values), _flat(gradient), _flat(of_values)
        grid, sizes = _division(x, ctx.rows)
        pieces = torch.empty(grid[0], grid[1], 2, x.shape[1], device=x.device)
        launch(_sum_gradients, grid, x, g, pieces, saved, *x.stride(), *g.stride(), **sizes)
        of_parameters = torch.empty(2, x.shape[1], device=x.device)
        arguments = (x, g, y, pieces, saved, saved if weight is None else weight, of_parameters, grid[0])
        strides = (*x.stride(), *g.stride(), *y.stride())
        launch(_differentiate, grid, *arguments, *strides, HAS_WEIGHT=weight is not None, **sizes)
        found = zip(ctx.kinds, of_parameters, strict=True)
        of_weight, of_bias = (None if kind is None else each.to(kind) for kind, each in found)
        return of_values, None, of_weight, of_bias, None, None


def launch(kernel: Any, grid: tuple[int, int, int], *arguments: Any, **constants: Any) -> None:
    # Products and sums may be one instruction, which rounds once. Without a word Triton 3.9 warns of its next default.
    kernel[grid](*arguments, enable_fp_fusion=True, **constants)


def _flat(values: Tensor) -> Tensor:
    """`values` [n, channels, ...] as [n, channels, places]: a view, but of a gradient in a strange layout."""
    return values.reshape(*values.shape[:2], -1)


def _division(x: Tensor, rows: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    """The grid (virtual batches, pieces, blocks of channels), and the numbers that all kernels are given."""
    count, channels, places = x.shape
    values = rows * places
    # Neighbours in memory belong to one program: channels in channels_last, else places.
    block_channels = min(CHANNELS, triton.next_power_of_2(channels)) if x.stride(1) == 1 else 2
    block = min(triton.next_power_of_2(values), TILE // block_channels)
    blocks = triton.cdiv(channels, block_channels)
    wanted = max(1, PROGRAMS // (count // rows * blocks))
    piece = triton.cdiv(triton.cdiv(values, block), wanted) * block
    grid = (count // rows, triton.cdiv(values, piece), blocks)
    sizes = {"values": values, "spatial": places, "piece": piece, "channels": channels}
    return grid, {**sizes, "BLOCK": block, "BLOCK_CHANNELS": block_channels}


@triton.jit
def _join(count, mean, squares, other_count, other_mean, other_squares):
    """The count, the mean and the sum of squared distances from it, of two sets of values together."""
    total = count + other_count
    step = other_mean - mean
    mean += step * (other_count / total)
    squares += other_squares + step * step * (count * other_count / total)
    return total, mean, squares


@triton.jit
def _block(start, last, spatial, values, channels, BLOCK: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):
    """Of the values from `start` on in this program's virtual batch: sample, place and channel, and which exist."""
    number = start + tl.arange(0, BLOCK)
    position = tl.program_id(0).to(tl.int64) * values + number
    channel = tl.program_id(2) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    exists = (number < last)[:, None] & (channel < channels)[None, :]
    return (position // spatial)[:, None], (position % spatial)[:, None], channel[None, :], exists


@triton.jit
def _load(values, n, n_step, s, s_step, c, c_step, exists):
    """What `_block` has found, as float32, from a tensor with these strides; 0 where nothing is."""
    return tl.load(values + n * n_step + s * s_step + c * c_step, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def _place(pieces, piece_count, number, row, channels, channel):
    """Where piece `number` of this program's virtual batch has its sums of kind `row`."""
    return pieces + ((tl.program_id(0) * piece_count + number) * 2 + row) * channels + channel


@triton.jit(do_not_specialize=NUMBERS)
def _sum_values(x, pieces, xn, xc, xs, values, spatial, piece, channels, BLOCK: tl.constexpr,
                BLOCK_CHANNELS: tl.constexpr):  # fmt: skip
    first = tl.program_id(1) * piece
    last = tl.minimum(first + piece, values)
    count = 0.0
    mean = tl.zeros((BLOCK_CHANNELS,), tl.float32)
    squares = tl.zeros((BLOCK_CHANNELS,), tl.float32)
    for start in range(first, last, BLOCK):
        n, s, c, exists = _block(start, last, spatial, values, channels, BLOCK, BLOCK_CHANNELS)
        here = _load(x, n, xn, s, xs, c, xc, exists)
        some = tl.minimum(last - start, BLOCK).to(tl.float32)
        average = tl.sum(here, 0) / some
        distance = tl.where(exists, here - average[None, :], 0.0)
        count, mean, squares = _join(count, mean, squares, some, average, tl.sum(distance * distance, 0))
    channel = tl.program_id(2) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    tl.store(_place(pieces, tl.num_programs(1), tl.program_id(1), 0, channels, channel), mean, channel < channels)
    tl.store(_place(pieces, tl.num_programs(1), tl.program_id(1), 1, channels, channel), squares, channel < channels)


@triton.jit(do_not_specialize=NUMBERS)
def _normalise(x, y, pieces, saved, kept, weight, bias, eps, kept_batch, kept_row, xn, xc, xs, yn, yc, ys, values,
               spatial, piece, channels, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, KEEPS: tl.constexpr,
               BLOCK: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):  # fmt: skip
    channel = tl.program_id(2) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    known, batch = channel < channels, tl.program_id(0)
    count = 0.0
    mean = tl.zeros((BLOCK_CHANNELS,), tl.float32)
    squares = tl.zeros((BLOCK_CHANNELS,), tl.float32)
    for number in range(tl.num_programs(1)):
        some = tl.minimum(piece, values - number * piece).to(tl.float32)
        average = tl.load(_place(pieces, tl.num_programs(1), number, 0, channels, channel), known, 0.0)
        distances = tl.load(_place(pieces, tl.num_programs(1), number, 1, channels, channel), known, 0.0)
        count, mean, squares = _join(count, mean, squares, some, average, distances)
    inverse = 1 / tl.sqrt(squares / count + eps)
    if tl.program_id(1) == 0:
        tl.store(saved + batch * 2 * channels + channel, mean, known)
        tl.store(saved + (batch * 2 + 1) * channels + channel, inverse, known)
        if KEEPS:
            tl.store(kept + batch * kept_batch + channel, mean, known)
            tl.store(kept + batch * kept_batch + kept_row + channel, squares / (count - 1), known)
    scale = inverse
    if HAS_WEIGHT:
        scale *= tl.load(weight + channel, known, 0.0).to(tl.float32)
    shift = tl.zeros((BLOCK_CHANNELS,), tl.float32)
    if HAS_BIAS:
        shift += tl.load(bias + channel, known, 0.0).to(tl.float32)
    first = tl.program_id(1) * piece
    last = tl.minimum(first + piece, values)
    for start in range(first, last, BLOCK):
        n, s, c, exists = _block(start, last, spatial, values, channels, BLOCK, BLOCK_CHANNELS)
        here = _load(x, n, xn, s, xs, c, xc, exists)
        there = (here - mean[None, :]) * scale[None, :] + shift[None, :]
        tl.store(y + n * yn + s * ys + c * yc, there.to(y.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=NUMBERS)
def _sum_gradients(x, g, pieces, saved, xn, xc, xs, gn, gc, gs, values, spatial, piece, channels,
                   BLOCK: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):  # fmt: skip
    channel = tl.program_id(2) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    known = channel < channels
    mean = tl.load(saved + tl.program_id(0) * 2 * channels + channel, known, 0.0)
    inverse = tl.load(saved + (tl.program_id(0) * 2 + 1) * channels + channel, known, 0.0)
    sums = tl.zeros((BLOCK_CHANNELS,), tl.float32)
    products = tl.zeros((BLOCK_CHANNELS,), tl.float32)
    first = tl.program_id(1) * piece
    last = tl.minimum(first + piece, values)
    for start in range(first, last, BLOCK):
        n, s, c, exists = _block(start, last, spatial, values, channels, BLOCK, BLOCK_CHANNELS)
        here = _load(x, n, xn, s, xs, c, xc, exists)
        slope = _load(g, n, gn, s, gs, c, gc, exists)
        sums += tl.sum(slope, 0)
        products += tl.sum(slope * (here - mean[None, :]), 0)
    tl.store(_place(pieces, tl.num_programs(1), tl.program_id(1), 0, channels, channel), sums, known)
    tl.store(_place(pieces, tl.num_programs(1), tl.program_id(1), 1, channels, channel), products * inverse, known)


@triton.jit(do_not_specialize=NUMBERS)
def _differentiate(x, g, y, pieces, saved, weight, of_parameters, batches, xn, xc, xs, gn, gc, gs, yn, yc, ys,
                   values, spatial, piece, channels, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
                   BLOCK_CHANNELS: tl.constexpr):  # fmt: skip
    channel = tl.program_id(2) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    known, batch = channel < channels, tl.program_id(0)
    if (batch == 0) & (tl.program_id(1) == 0):  # the gradients of weight and bias, over all virtual batches
        of_weight = tl.zeros((BLOCK_CHANNELS,), tl.float32)
        of_bias = tl.zeros((BLOCK_CHANNELS,), tl.float32)
        for number in range(batches * tl.num_programs(1)):
            of_bias += tl.load(pieces + number * 2 * channels + channel, known, 0.0)
            of_weight += tl.load(pieces + (number * 2 + 1) * channels + channel, known, 0.0)
        tl.store(of_parameters + channel, of_weight, known)
        tl.store(of_parameters + channels + channel, of_bias, known)
    sums = tl.zeros((BLOCK_CHANNELS,), tl.float32)
    products = tl.zeros((BLOCK_CHANNELS,), tl.float32)
    for number in range(tl.num_programs(1)):
        sums += tl.load(_place(pieces, tl.num_programs(1), number, 0, channels, channel), known, 0.0)
        products += tl.load(_place(pieces, tl.num_programs(1), number, 1, channels, channel), known, 0.0)
    mean = tl.load(saved + batch * 2 * channels + channel, known, 0.0)
    inverse = tl.load(saved + (batch * 2 + 1) * channels + channel, known, 0.0)
    scale = inverse
    if HAS_WEIGHT:
        scale *= tl.load(weight + channel, known, 0.0).to(tl.float32)
    first = tl.program_id(1) * piece
    last = tl.minimum(first + piece, values)
    for start in range(first, last, BLOCK):
        n, s, c, exists = _block(start, last, spatial, values, channels, BLOCK, BLOCK_CHANNELS)
        here = _load(x, n, xn, s, xs, c, xc, exists)
        slope = _load(g, n, gn, s, gs, c, gc, exists)
        distance = (here - mean[None, :]) * inverse[None, :]
        there = scale[None, :] * (slope - (sums[None, :] + distance * products[None, :]) / values)
        tl.store(y + n * yn + s * ys + c * yc, there.to(y.dtype.element_ty), mask=exists)
