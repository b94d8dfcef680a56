"""What a run computes in: the precision that the launcher chose, and what torch rounds float32 to on CUDA.

torch has an older switch for TF32 (`set_float32_matmul_precision`, `allow_tf32`) and a newer one (`fp32_precision`).
After the newer one was set, the older getters may raise, and inductor still calls them. So TF32 is turned on with the
older one, and only the newer one is read: https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator


def precision(accelerator: Accelerator) -> str:
    """What the forward pass computes in: "fp32", "tf32", "bf16", "fp16" or "fp8"; see `precision_notice`.

    "tf32": float32, where CUDA may round the inputs of matrix products or convolutions to TF32.
    """
    asked, kind = str(accelerator.mixed_precision), accelerator.device.type
    if asked != "no" and not (asked == "fp16" and kind == "cpu"):
        return asked
    return "tf32" if kind == "cuda" and uses_tf32() else "fp32"


def precision_notice(accelerator: Accelerator) -> str | None:
    """A sentence for a run whose precision is not the one that was asked for: Accelerate does not report that."""
    if accelerator.mixed_precision in ("no", precision(accelerator)):
        return None
    asked, computed = accelerator.mixed_precision, precision(accelerator)
    return (
        f"{asked} was asked for, but the run computes in {computed}: Accelerate has no {asked} on a CPU (it has bf16)"
    )


def _float32_switches() -> list[Any]:
    """What has an attribute `fp32_precision`: "tf32", "ieee", or "none" for the default, which is not to round."""
    backends: Any = torch.backends
    return [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]


def use_tf32() -> None:
    """Let CUDA round the float32 inputs of matrix products to TF32. Those of convolutions are rounded by default."""
    torch.set_float32_matmul_precision("high")


def uses_tf32() -> bool:
    """Whether CUDA may round float32 inputs of matrix products, convolutions or recurrent layers to TF32."""
    overruled = os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"  # NVIDIA's libraries read it
    return not overruled and any(switch.fp32_precision == "tf32" for switch in _float32_switches())


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute in full float32 inside."""
    before = [switch.fp32_precision for switch in _float32_switches()]
    try:
        for switch in _float32_switches():
            switch.fp32_precision = "ieee"
        yield
    finally:
        for switch, value in zip(_float32_switches(), before, strict=True):
            switch.fp32_precision = value
