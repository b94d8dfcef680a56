"""The parts of torch's mixed precision that have no public interface, checked with torch 2.15.

tests/optim/test_amp_internals.py fails if one of them changes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def scale_without_waiting(scaler: torch.amp.GradScaler) -> Tensor | None:
    """The loss scale, float32 [1] on the device; None before the first backward pass.

    The public `get_scale()` returns a float and therefore waits for the device.
    """
    return scaler._get_scale_async()


def flag_nonfinite(tensors: Iterable[Tensor], flag: Tensor, one: Tensor) -> None:
    """Set `flag` (float32 [], on the device) to 1 if a value is not finite; it stays as it is otherwise.

    Uses the GradScaler's kernel, one launch for many tensors of one dtype. `one`: a 1 like `flag`, the factor by which
    the kernel multiplies the tensors, so that it does not change them.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same_dtype in by_dtype.values():
        torch._amp_foreach_non_finite_check_and_unscale_(same_dtype, flag, one)
