"""The masks of a forward pass, computed together: those that the pass before has asked for.

A mask takes some fifteen kernels. On a GPU the update of a small network takes as long as launching its kernels, so
fifteen for all layers take less time than fifteen for each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from accel_train.keyed import GOLDEN, hashed, scramble, signed

STEPS = 65536
"""A mask compares 16 random bits with a threshold, so drop rates are multiples of 1/65536."""
PER_WORD = 4
"""Elements of a mask that share the 64 bits of a hash, which costs more than the rest."""
LIMIT = 1 << 22
"""Elements of the masks that are computed together. The kernels of more take longer than their launch, and would need
memory for all masks at once, even for those that gradient checkpointing computes again."""


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


class MasksTogether:
    """Computes those masks of a forward pass for which the pass before has asked, too."""

    def __init__(self) -> None:
        self._asked: dict[Call, None] = {}  # in this pass, in the order of the calls
        self._room = LIMIT  # for elements of further masks
        self._planned: tuple[list[Call], torch.device | None] = [], None
        self._masks: dict[Call, Tensor] = {}

    def clear(self) -> None:
        """Forget the masks, and which were asked for."""
        self._asked, self._masks, self._room = {}, {}, LIMIT

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
        self.clear()
        repeated = [hashed(call.number, keys[call.row]) for call in calls if call.number]
        return torch.cat([keys, torch.stack(repeated)]) if repeated else keys

    def _plan(self, rows: int, calls: list[Call], device: torch.device) -> None:
        repeated = [call for call in calls if call.number]
        self._rows = [rows + repeated.index(call) if call.number else call.row for call in calls]
        self._words = [call.words for call in calls]
        if calls:
            # Of a sample's words, the number of each in its mask; of their elements, the lowest draw that is kept.
            numbers = torch.cat([torch.arange(count) for count in self._words]) * signed(GOLDEN)
            lowest = torch.cat([torch.full((PER_WORD * call.words,), call.lowest, dtype=torch.int16) for call in calls])
            numbers, self._lowest = (
                pinned(values, device).to(device, non_blocking=True) for values in (numbers, lowest)
            )
            self._numbers = torch.split(numbers, self._words)

    def compute(self, keys: Tensor) -> None:
        """Compute the planned masks. `keys`: what `begin` has returned, on the device."""
        calls, device = self._planned
        if not calls:
            return
        keys = keys.T * signed(GOLDEN)
        words = torch.empty((len(keys), sum(self._words)), dtype=torch.int64, device=device)
        for row, numbers, part in zip(self._rows, self._numbers, torch.split(words, self._words, 1), strict=True):
            torch.add(numbers, keys[:, row, None], out=part)
        keep = scramble(words).view(torch.int16) >= self._lowest
        parts = torch.split(keep, [PER_WORD * count for count in self._words], 1)
        self._masks = {call: part[:, : call.size] for call, part in zip(calls, parts, strict=True)}


def pinned(values: Tensor, device: torch.device) -> Tensor:
    """`values` in memory from which a copy to `device` does not let the host wait."""
    return values.pin_memory() if device.type == "cuda" and values.device.type == "cpu" else values
