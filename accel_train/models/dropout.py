"""Dropout whose masks do not depend on the number of processes, nor on how a batch is divided.

    keys = convert_dropout(model, seed)
    keys.set_samples(ids, update)  # before each forward pass of training
    logits = model(images)

A mask is a function of keys: (seed, update, sample, layer, number of the layer's call). torch draws masks from one
generator for a whole micro-batch, so they depend on how a batch is divided. Here each sample has its own random numbers
in each layer, whatever the micro-batch and the process. They come from the hash in keyed.py. Known are the layers in
`keyed_class` and torch's function `dropout`. Other kinds of dropout draw from torch's generators: the trial of the
model finds them, and each forward pass of such a model has one virtual batch, whose random numbers are seeded
(trial.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from accel_train.compat import backward_pass
from accel_train.errors import UserError
from accel_train.keyed import GOLDEN, hashed, key, scramble, signed
from accel_train.models.wrapping import library_layer

STEPS = 65536
"""A mask compares 16 random bits with a threshold, so drop rates are multiples of 1/65536."""
PER_WORD = 4
"""Elements of a mask that share the 64 bits of a hash, which costs more than the rest."""
LIMIT = 1 << 22
"""Elements of the masks that are computed together. The kernels of more take longer than their launch, and would need
memory for all masks at once, even for those that gradient checkpointing computes again."""


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
        # int64 [rows, samples]; PlannedMasks may add rows. It is changed in place: torch.compile then neither compiles
        # again for an update nor takes an old value for a constant.
        self._table: Tensor | None = None
        self._together = PlannedMasks()
        # How often each layer was called in this forward pass. After its second call a layer is `_repeated`: only
        # then compiled code has to count, which torch.compile cannot do inside gradient checkpointing.
        self._calls = [0] * len(self._words)
        self._repeated = [False] * len(self.layers) + [True]

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

    def rate(self, p: float) -> float:
        """The drop rate to use in place of `p`: `p`, unless a model is checked."""
        return p if self.rate_of_check is None or not 0 < p < 1 else self.rate_of_check

    def mask(self, row: int, shape: Sequence[int], p: float) -> Mask | None:
        """A mask of `shape` that drops with probability `p`, for the next call of layer `row`.

        The first dimension counts samples, or a multiple of them with the parts of a sample side by side (such as
        the windows of a Swin transformer). None if it is neither, or without samples: then use torch's own function.
        """
        if self._table is None:
            return None
        number, keys = self._number_of_call(row), self._table[row]
        if not shape or shape[0] % len(keys):
            return None
        call = Call(row, number, prod(shape) // len(keys), round(p * STEPS))
        if call.dropped == STEPS:
            return Mask(torch.zeros(tuple(shape), dtype=torch.bool, device=keys.device), 0.0)
        # A compiled layer has one kernel of its own.
        keep = None if torch.compiler.is_compiling() else self._together.mask(call, len(keys))
        if keep is None:
            keep = _words(number, keys, call.words).view(torch.int16)[:, : call.size] >= call.lowest
        return Mask(keep.reshape(tuple(shape)), 1 - call.dropped / STEPS)

    def _number_of_call(self, row: int) -> int:
        """How often layer `row` was called before in this forward pass.

        Gradient checkpointing calls a layer again in the backward pass, in another order. Raises UserError for a layer
        that has several calls: nobody knows which one is repeated.
        """
        if torch.compiler.is_compiling():
            if not self._repeated[row]:
                return 0
        elif backward_pass() is not None:
            if self._calls[row] > 1:
                raise UserError(
                    f"model: the dropout layer {self.layers[row]} is called several times, and gradient checkpointing "
                    "computes it again. Use a layer for each call."
                )
            return 0
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


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    """torch's scaled_dot_product_attention with a given dropout mask [n, heads, L, S], by the formula that torch
    documents.

    query [n, heads, L, E], key [n, heads, S, E], value [n, heads, S, V]. Returns [n, heads, L, V]. The fused kernels
    draw their masks themselves, so they cannot be used.
    """
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    return scaled(scores.softmax(-1), mask) @ value


class Call(NamedTuple):
    """A layer's request for a mask."""

    row: int
    """Of the layer."""
    number: int
    """How often the layer was called before in the same forward pass."""
    size: int
    """Elements of one sample."""
    dropped: int
    """The drop rate in multiples of 1 / STEPS; less than 1."""

    @property
    def words(self) -> int:
        """Words of one sample."""
        return -(-self.size // PER_WORD)

    @property
    def lowest(self) -> int:
        """The lowest draw, an int16, whose element is kept."""
        return self.dropped - STEPS // 2


class PlannedMasks:
    """Computes those masks of a forward pass for which the pass before has asked, too.

    A mask takes some fifteen kernels. On a GPU the update of a small network takes as long as launching its kernels, so
    fifteen for all layers take less time than fifteen for each.
    """

    def __init__(self) -> None:
        self._asked: dict[Call, None] = {}  # in this pass, in the order of the calls
        self._room = LIMIT  # for elements of further masks
        self._planned: tuple[list[Call], torch.device | None] = [], None
        self._masks: dict[Call, Tensor] = {}

    def mask(self, call: Call, samples: int) -> Tensor | None:
        """What the layer keeps, bool [samples, call.size]; None if it must compute that itself."""
        if call not in self._asked and self._room >= samples * call.size:
            self._asked[call] = None
            self._room -= samples * call.size
        return self._masks.get(call)

    def begin(self, keys: Tensor, device: torch.device) -> Tensor:
        """Begin a forward pass, with masks on `device`. `keys`: of each layer and sample, int64 [rows, b].

        Returns them, and below them those of the planned calls that are not the first one of their layer.
        """
        calls = list(self._asked) if len(self._asked) > 1 else []  # a single one gains nothing
        if (calls, device) != self._planned:
            self._planned = calls, device
            self._plan(len(keys), calls, device)
        self._asked, self._masks, self._room = {}, {}, LIMIT
        repeated = [hashed(call.number, keys[call.row]) for call in calls if call.number]
        return torch.cat([keys, torch.stack(repeated)]) if repeated else keys

    def _plan(self, rows: int, calls: list[Call], device: torch.device) -> None:
        repeated = [call for call in calls if call.number]
        self._rows = [rows + repeated.index(call) if call.number else call.row for call in calls]
        if calls:
            # Of a sample's words, the number of each in its mask; of their elements, the lowest draw that is kept.
            numbers = torch.cat([torch.arange(call.words) for call in calls]) * signed(GOLDEN)
            lowest = torch.cat([torch.full((PER_WORD * call.words,), call.lowest, dtype=torch.int16) for call in calls])
            self._numbers, self._lowest = (
                pinned(values, device).to(device, non_blocking=True) for values in (numbers, lowest)
            )

    def compute(self, keys: Tensor) -> None:
        """Compute the planned masks. `keys`: what `begin` has returned, on the device."""
        calls, _ = self._planned
        if not calls:
            return
        keys = keys.T * signed(GOLDEN)
        words = [keys[:, row, None].expand(-1, call.words) for row, call in zip(self._rows, calls, strict=True)]
        keep = scramble(torch.cat(words, 1).add_(self._numbers)).view(torch.int16) >= self._lowest
        parts = torch.split(keep, [PER_WORD * call.words for call in calls], 1)
        self._masks = {call: part[:, : call.size] for call, part in zip(calls, parts, strict=True)}


def pinned(values: Tensor, device: torch.device) -> Tensor:
    """`values` in memory from which a copy to `device` does not let the host wait."""
    return values.pin_memory() if device.type == "cuda" and values.device.type == "cpu" else values


def convert_dropout(model: nn.Module, seed: int) -> DropoutKeys:
    """Give the dropout layers of `model` masks from the returned keys, in place. Call it before the model is wrapped.

    It assigns `__class__`, as optim/performance.py does: names of modules, state dict, hooks and references stay. Only
    the exact classes of torch, timm and torchvision are converted, because a subclass may mean something else. A layer
    whose rate is 0 draws nothing, and stays. timm's attention modules with dropout change to their unfused form, which
    calls their dropout layer.
    """
    layers: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if keyed_class(type(module)) is not None and _rate(module) > 0
    }
    keys = DropoutKeys(seed, list(layers))
    for row, layer in enumerate(layers.values()):
        layer.__class__ = keyed_class(type(layer))
        layer.keys, layer.row = keys, row
    attention: Any
    for attention in model.modules():
        if getattr(attention, "fused_attn", False) and getattr(getattr(attention, "attn_drop", None), "p", 0) > 0:
            attention.fused_attn = False
    return keys


def _rate(layer: nn.Module) -> float:
    """The drop rate of a layer, by the name that its class gives it."""
    names = ("p", "drop_prob", "dropout")
    return next((float(getattr(layer, name) or 0) for name in names if hasattr(layer, name)), 0.0)


class KeyedFunctions(TorchFunctionMode):
    """While a model runs in this context, torch's function `dropout` takes its masks from `keys`.

    The calls are numbered in their order, so a forward pass must make the same calls on all processes. Enter the
    context for each forward pass, after `keys.set_samples`. Each of torch's functions passes through Python then, so
    use it only for a model that needs it: the trial of the model (trial.py) says so. A call that gradient checkpointing
    repeats in the backward pass is not redirected.
    """

    def __init__(self, keys: DropoutKeys) -> None:
        super().__init__()
        self.keys = keys

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = self._dropout(*args, **(kwargs or {})) if func is F.dropout else None
        return func(*args, **(kwargs or {})) if result is None else result

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor | None:
        """As F.dropout; None if torch's own must be called."""
        keys = self.keys
        mask = keys.mask(keys.function_row, input.shape, keys.rate(p)) if training and p > 0 else None
        return None if mask is None else scaled(input, mask, inplace)


class _Keyed:
    """Mixed into a dropout layer: in training its forward pass is `keyed`, unless that returns None."""

    keys: DropoutKeys
    row: int
    keyed: Callable[..., Any]
    """Takes the arguments of forward. None: the layer's own must be called, because its rate is 0, there is no mask,
    or it is called in a way that `keyed` does not know."""

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        result = self.keyed(*args, **options) if self.training else None
        return super().forward(*args, **options) if result is None else result  # type: ignore[misc]

    def mask(self, shape: Sequence[int], p: float) -> Mask | None:
        return self.keys.mask(self.row, shape, self.keys.rate(p)) if p > 0 else None


class _Elements(_Keyed):
    def keyed(self: Any, input: Tensor) -> Tensor | None:
        mask = self.mask(input.shape, self.p)
        return None if mask is None else scaled(input, mask, self.inplace)


class _Channels(_Keyed):
    def keyed(self: Any, input: Tensor) -> Tensor | None:
        # torch takes values of three dimensions for a single sample without a batch.
        mask = self.mask((*input.shape[:2], 1, 1), self.p) if input.dim() == 4 else None
        return None if mask is None else scaled(input, mask, self.inplace)


class _Attention(_Keyed):
    """nn.MultiheadAttention for what image classifiers need: self-attention of [n, tokens, d] without a mask."""

    def keyed(self: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        known = query is key is value and query.dim() == 3 and self.batch_first and self.in_proj_weight is not None
        known = known and self.bias_k is None and not self.add_zero_attn and not args and "need_weights" in options
        if not known or not all(option is None or option is False for option in options.values()):
            return None
        n, tokens, _ = query.shape
        mask = self.mask((n, self.num_heads, tokens, tokens), self.dropout)
        if mask is None:
            return None
        projected = F.linear(query, self.in_proj_weight, self.in_proj_bias)
        # [n, tokens, 3 d] -> three times [n, heads, tokens, d / heads]
        parts = projected.view(n, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        attended = attention(parts[0], parts[1], parts[2], mask)
        return self.out_proj(attended.transpose(1, 2).flatten(2)), None


def _sample_shape(values: Tensor) -> tuple[int, ...]:
    """The shape of a mask that drops whole samples of `values` [n, …]: [n, 1, …]."""
    return (len(values), *(1 for _ in values.shape[1:]))


class _Path(_Keyed):
    """timm's DropPath: drops a residual branch of a sample."""

    def keyed(self: Any, x: Tensor) -> Tensor | None:
        mask = self.mask(_sample_shape(x), self.drop_prob)
        if mask is None:
            return None
        return scaled(x, mask) if self.scale_by_keep else x * mask.keep


class _Depth(_Keyed):
    """torchvision's StochasticDepth in mode "row", which is a DropPath."""

    def keyed(self: Any, input: Tensor) -> Tensor | None:
        mask = self.mask(_sample_shape(input), self.p) if self.mode == "row" else None
        return None if mask is None else scaled(input, mask)


KEYED: dict[type[nn.Module], type[nn.Module]] = {}
"""The classes that were replaced, and by what."""


def keyed_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class by which `convert_dropout` replaces a layer of this class; None for layers that it does not know."""
    mixins: dict[type[nn.Module] | None, type[_Keyed]] = {
        nn.Dropout: _Elements,
        nn.Dropout2d: _Channels,
        nn.MultiheadAttention: _Attention,
        library_layer("timm.layers", "DropPath"): _Path,
        library_layer("torchvision.ops", "StochasticDepth"): _Depth,
    }
    if kind not in KEYED and (mixin := mixins.get(kind)) is not None:
        KEYED[kind] = type(f"Keyed{kind.__name__}", (mixin, kind), {})
    return KEYED.get(kind)
