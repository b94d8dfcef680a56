"""Dropout masks that are a function of keys: (seed, update, sample, layer, number of the layer's call).

torch draws masks from one generator for a whole micro-batch, so they depend on how a batch is divided. Here each sample
has its own random numbers in each layer, whatever the micro-batch and the process. They come from the hash in keyed.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel_train.keyed import GOLDEN, hashed, key, scramble, signed
from accel_train.launch.compat import backward_pass
from accel_train.models.dropout.together import STEPS, Call, MasksTogether, pinned


class Mask(NamedTuple):
    """Which elements a dropout layer keeps."""

    keep: Tensor
    """bool: True where an element is kept."""
    kept: float
    """The probability of True: exact, a multiple of 1/65536."""

    @property
    def scale(self) -> float:
        """The factor for kept elements that leaves the expectation as it was; 0 if none is ever kept."""
        return 1 / self.kept if self.kept else 0.0


class DropoutKeys:
    """The random numbers of the dropout layers of one model.

    Call `set_samples` before each forward pass of training. Without it, the layers draw from torch's generators.
    """

    def __init__(self, seed: int, layers: Sequence[str]) -> None:
        """`layers`: the names of the layers; `row` below is a place in this list. One more row is for functions."""
        self.seed = seed
        self.layers = tuple(layers)
        self.rate_of_check: float | None = None
        """Replaces each rate between 0 and 1 while a model is checked: errors hide if a mask drops little."""
        self._words = torch.tensor([key(name) for name in (*self.layers, "")])
        # int64 [rows, samples]; MasksTogether may add rows. It is changed in place: torch.compile then neither compiles
        # again for an update nor takes an old value for a constant.
        self._table: Tensor | None = None
        self._together = MasksTogether()
        # How often each layer was called in this forward pass. After its second call a layer is `_repeated`: only
        # then compiled code has to count, which torch.compile cannot do inside gradient checkpointing.
        self._calls = [0] * len(self._words)
        self._repeated = [False] * len(self.layers) + [True]
        self._recomputation, self._recomputed = -1, [0] * len(self._words)

    def __deepcopy__(self, memo: dict[int, Any]) -> DropoutKeys:
        """A copy of a layer has the same keys: it must not copy what belongs to all layers."""
        return self

    @property
    def function_row(self) -> int:
        """The row for functions, which belong to no converted module."""
        return len(self.layers)

    def set_samples(self, ids: Tensor, update: int, device: torch.device | None = None) -> None:
        """Begin a forward pass of training with the samples `ids` of `update`.

        `ids`: int64 [b], best on the host: there their hash costs less than to launch its kernels would. `device`: the
        model's; None: where the ids are.
        """
        self._calls = [0] * len(self._calls)
        device = device or ids.device
        self._words = self._words.to(ids.device)
        table = scramble(hashed(key(self.seed, "dropout", update), ids) + self._words[:, None])
        table = pinned(self._together.begin(table, device), device)
        if self._table is None or self._table.shape != table.shape or self._table.device != device:
            self._table = torch.empty_like(table, device=device)
        self._table.copy_(table, non_blocking=True)
        self._together.compute(self._table)

    def clear(self) -> None:
        """Forget the samples: until the next `set_samples` the layers draw from torch's generators."""
        self._table = None
        self._together.clear()

    def rate(self, p: float) -> float:
        """The drop rate to use in place of `p`: `p`, unless a model is checked."""
        return p if self.rate_of_check is None or not 0 < p < 1 else self.rate_of_check

    def mask(self, row: int, shape: Sequence[int], p: float) -> Mask | None:
        """A mask of `shape` that drops with probability `p`, for the next call of layer `row`.

        The first dimension counts samples, or a multiple of them with the parts of a sample side by side (such as
        the windows of a Swin transformer). None if it is neither, or without samples: then use torch's own function.
        """
        called = self._begin_call(row, shape)
        if called is None:
            return None
        number, keys = called
        call = Call(row, number, prod(shape) // len(keys), round(p * STEPS))
        if call.dropped == STEPS:
            return Mask(torch.zeros(tuple(shape), dtype=torch.bool, device=keys.device), 0.0)
        # A compiled layer has one kernel of its own.
        keep = None if torch.compiler.is_compiling() else self._together.mask(call, len(keys))
        if keep is None:
            keep = _words(number, keys, call.words).view(torch.int16)[:, : call.size] >= call.lowest
        return Mask(keep.reshape(tuple(shape)), 1 - call.dropped / STEPS)

    def words(self, row: int, shape: Sequence[int]) -> Tensor | None:
        """Random 64-bit words for the elements of `shape`, for the next call of layer `row`; None as `mask` says.

        Returns int64 [b, words]: those of each sample, in the order of its elements.
        """
        called = self._begin_call(row, shape)
        return None if called is None else _words(*called, prod(shape) // len(called[1]))

    def _begin_call(self, row: int, shape: Sequence[int]) -> tuple[int, Tensor] | None:
        """The number of the next call of layer `row`, and each sample's word in this layer, int64 [b]."""
        if self._table is None:
            return None
        number, keys = self._number_of_call(row), self._table[row]
        return (number, keys) if shape and shape[0] % len(keys) == 0 else None

    def _number_of_call(self, row: int) -> int:
        """How often layer `row` was called before in this forward pass.

        Gradient checkpointing calls a layer again in the backward pass, on a GPU in another thread. Those calls are
        counted from 0, so they agree if all calls of the layer are in one checkpointed segment.
        """
        if torch.compiler.is_compiling():
            if not self._repeated[row]:
                return 0
        else:
            backward = backward_pass()
            if backward is not None:
                if backward != self._recomputation:
                    self._recomputation, self._recomputed = backward, [0] * len(self._calls)
                number = self._recomputed[row] % max(1, self._calls[row])
                self._recomputed[row] += 1
                return number
        number = self._calls[row]
        self._calls[row] += 1
        if number and not self._repeated[row]:
            self._repeated[row] = True
        return number


def _words(number: int, keys: Tensor, count: int) -> Tensor:
    """The words of each sample in call `number` of a layer in which the samples have these `keys`, int64 [b, count]."""
    if number:
        keys = hashed(number, keys)
    # The product must come after the sum: torch.compile (2.15) makes `arange * constant` a product of a signed loop
    # variable in C++, which overflows. That is undefined there, and the compiled loop wrote beyond its end.
    numbers = torch.arange(count, device=keys.device) + keys[:, None]
    return scramble(numbers.mul_(signed(GOLDEN)))


def scaled(values: Tensor, mask: Mask, inplace: bool = False) -> Tensor:
    """Dropout: zero where `mask` drops, and the rest times the scale that keeps the expectation.

    Like torch's own dropout it keeps only the bool mask for the backward pass.
    """
    masked = values.mul_(mask.keep) if inplace else values * mask.keep
    return masked.mul_(mask.scale)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """torch's scaled_dot_product_attention with a given dropout mask [n, …, L, S], by the formula that torch documents.

    query [n, …, L, E], key [n, …, S, E], value [n, …, S, V], bias (torch's attn_mask) bool or float, broadcastable to
    the mask. Returns [n, …, L, V]. The fused kernels draw their masks themselves, so they cannot be used.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if causal:
        bias = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if bias is not None:
        scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias
    return scaled(scores.softmax(-1), mask) @ value


def channel_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a mask that drops whole channels of values of `shape` [n, C, …]: [n, C, 1, …]."""
    return (*shape[:2], *(1 for _ in shape[2:]))


def sample_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a mask that drops whole samples of values of `shape` [n, …]: [n, 1, …]."""
    return (shape[0], *(1 for _ in shape[1:]))
