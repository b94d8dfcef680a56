"""The guard against losses that are not finite, on its own; test_nonfinite.py trains with it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accel_train.checkpoint.state import TrainState
from accel_train.config.schema import Config
from accel_train.errors import UserError
from accel_train.run import nonfinite
from accel_train.run.nonfinite import Guard

said: list[Any] = []


class Counting(nn.Module):
    """Has a buffer that each forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.passes.add_(1)  # type: ignore[operator]
        return self.line(values)[:, 0]  # type: ignore[no-any-return]


def guard_of(model: nn.Module, policy: str, processes: int = 1) -> Guard:
    device = torch.device("cpu")
    accelerator: Any = SimpleNamespace(
        num_processes=processes, process_index=0, is_main_process=True, device=device, scaler=None
    )
    return Guard(Config(on_nonfinite=policy), accelerator, model, said.append)  # type: ignore[arg-type]


def passes(guard: Guard, model: nn.Module, state: TrainState, factor: float) -> bool:
    """Compute an update of three samples, whose losses are multiplied by `factor`."""
    guard.start(state)
    batch = {"ids": torch.tensor([4, 7, 9])}
    losses = model(torch.ones(3, 2)) * torch.tensor([1.0, factor, 1.0])
    losses.sum().backward()
    guard.record(batch, losses)
    return guard.check_step(state)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite, "gather_object", lambda values: values)


def test_a_skipped_update_leaves_the_buffers_and_its_samples_are_named() -> None:
    model, state = Counting(), TrainState()
    guard = guard_of(model, "skip")
    assert passes(guard, model, state, 1.0) and model.passes == 1
    model.zero_grad()
    assert not passes(guard, model, state, math.nan)
    assert model.passes == 1 and (state.skipped_updates, state.skipped_in_a_row) == (1, 1)
    assert said[-1].reason == "the loss of 1 of 3 samples (ids 7)"
    model.zero_grad()
    assert passes(guard, model, state, 1.0) and (state.skipped_updates, state.skipped_in_a_row) == (1, 0)


def test_what_is_bad_on_another_process_is_bad_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients tell it only where DDP reduces them, and under a loss scaler they do not count."""
    others = 0.0

    def all_reduce(values: torch.Tensor, operation: Any) -> None:
        assert operation == torch.distributed.ReduceOp.MAX
        values.clamp_(min=others)

    monkeypatch.setattr(nonfinite.dist, "all_reduce", all_reduce)
    model, state = Counting(), TrainState()
    guard = guard_of(model, "stop", processes=2)
    assert passes(guard, model, state, 1.0)
    guard.check_previous()
    others = 1.0
    model.zero_grad()
    assert passes(guard, model, state, 1.0)  # the answer is read later, and before anything is logged or saved
    with pytest.raises(UserError, match="Update 1 is not finite"):
        guard.check_previous()
