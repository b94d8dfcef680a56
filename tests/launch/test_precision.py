"""What torch may round float32 to, whichever of its two switches the user's code has used."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_train.launch.accelerator import precision, use_tf32, uses_tf32, without_tf32

SWITCHES: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn]  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = [switch.fp32_precision for switch in SWITCHES]
    yield
    torch.set_float32_matmul_precision("highest")
    for switch, value in zip(SWITCHES, before, strict=True):
        switch.fp32_precision = value


def set_all(value: str) -> None:
    for switch in SWITCHES:
        switch.fp32_precision = value


def test_what_is_in_force_is_said() -> None:
    gpu: Any = SimpleNamespace(mixed_precision="no", device=torch.device("cuda:0"))
    cpu: Any = SimpleNamespace(mixed_precision="no", device=torch.device("cpu"))
    for switch in SWITCHES:
        set_all("ieee")
        assert not uses_tf32() and precision(gpu) == "fp32"
        switch.fp32_precision = "tf32"
        assert uses_tf32() and precision(gpu) == "tf32" and precision(cpu) == "fp32"
    assert precision(SimpleNamespace(mixed_precision="bf16", device=gpu.device)) == "bf16"  # type: ignore[arg-type]


def test_nvidias_switch_is_above_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all("tf32")
    for value, expected in (("0", False), ("1", True)):
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", value)
        assert uses_tf32() == expected


def test_after_use_tf32_the_older_getters_still_answer() -> None:
    """Inductor calls them, and they raise if the newer switch has been set to something else."""
    use_tf32()
    assert uses_tf32() and torch.backends.cuda.matmul.allow_tf32 and torch.get_float32_matmul_precision() == "high"
    with without_tf32():
        assert not uses_tf32()
    assert torch.backends.cuda.matmul.allow_tf32 and torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize("value", ["ieee", "tf32"])
def test_a_trial_computes_in_full_float32_whichever_switch_was_set(value: str) -> None:
    """After a user's code has set the newer switch for convolutions alone, the older getter raises."""
    torch.backends.cudnn.conv.fp32_precision = value  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = "ieee"  # type: ignore[attr-defined]
    with without_tf32():
        assert not uses_tf32()
    assert SWITCHES[1].fp32_precision == value
