"""One update on its own, and the guard against losses that are not finite; test_nonfinite.py trains with them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from accel_train import step
from accel_train.checkpoint.state import TrainState
from accel_train.config.schema import Config
from accel_train.data.order import Plan
from accel_train.errors import UserError
from accel_train.models.batchnorm import VirtualBatches
from accel_train.models.verdict import Verdict
from accel_train.step import Guard, Step

said: list[Any] = []


class Counting(nn.Module):
    """Has a buffer that each forward pass changes."""

    def __init__(self, *, rebinds: bool = False) -> None:
        super().__init__()
        self.line, self.rebinds = nn.Linear(2, 1), rebinds
        self.passes: torch.Tensor
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.rebinds:  # puts another tensor in the buffer's place
            self.passes = self.passes + 1
        else:
            self.passes.add_(1)
        return self.line(values)[:, 0]  # type: ignore[no-any-return]


class Training:
    """Updates of three samples each, and a place that is padding."""

    def __init__(self, on_nonfinite: str, *, rebinds: bool = False) -> None:
        self.config = Config(on_nonfinite=on_nonfinite, batch_size=3)  # type: ignore[arg-type]
        self.model, self.state = Counting(rebinds=rebinds), TrainState()
        accelerator = Accelerator(cpu=True)
        self.step = Step(
            self.config,
            accelerator,
            Plan(samples=3, batch_size=3, processes=1, accumulation=1),
            self.model,
            self.model,
            torch.optim.SGD(self.model.parameters(), lr=0.1),
            ema=None,
            verdict=Verdict(),
            virtual_batches=VirtualBatches(self.model, 1, None),
            dropout=None,
        )
        self.guard = Guard(self.config, accelerator, self.model, said.append)

    def update(self, factor: float) -> bool:
        """Make an update whose second loss is multiplied by `factor`; return whether it was applied."""
        batch = {"ids": torch.tensor([4, 7, 9, 4]), "weights": torch.tensor([1.0, 1.0, 1.0, 0.0])}
        for each in self.step.micro_batches([batch], self.state.update, 3):
            losses = self.step.forward(torch.ones(4, 2)) * torch.tensor([1.0, factor, 1.0, 1.0])
            self.step.backward(losses * each["weights"])
        applied = self.guard.check_step(self.state, self.step.computed)
        if applied:
            self.step.apply(self.state.update + 1)
        else:
            self.step.discard()
        return applied

    def weights(self) -> list[float]:
        return self.model.line.weight.flatten().tolist()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "gather_object", lambda values: values)


@pytest.mark.parametrize("rebinds", [False, True])
def test_a_skipped_update_leaves_nothing_and_its_samples_are_named(rebinds: bool) -> None:
    training = Training("skip", rebinds=rebinds)
    assert training.update(1.0) and training.model.passes == 1
    before = training.weights()
    assert not training.update(math.nan)
    state = training.state
    assert training.model.passes == 1 and (state.skipped_updates, state.skipped_in_a_row) == (1, 1)
    assert training.weights() == before and training.model.line.weight.grad is None
    assert said[-1].reason == "the loss of 1 of 3 samples (ids 7)"
    assert training.update(1.0) and (state.skipped_updates, state.skipped_in_a_row) == (1, 0)
    assert training.weights() != before and training.model.passes == 2


def test_what_is_bad_on_another_process_is_bad_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients tell it only where DDP reduces them, and under a loss scaler they do not count."""
    others = 0.0

    def all_reduce(values: torch.Tensor, operation: Any) -> None:
        assert operation == torch.distributed.ReduceOp.MAX
        values.clamp_(min=others)

    training = Training("stop")
    monkeypatch.setattr(step.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    assert training.update(1.0)
    training.guard.check_previous()
    others = 1.0
    assert training.update(1.0)  # the answer is read later, and before anything is logged or saved
    with pytest.raises(UserError, match="Update 1 is not finite"):
        training.guard.check_previous()


def test_a_process_that_had_only_padding_hears_of_a_loss_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training("skip")
    monkeypatch.setattr(step.dist, "all_reduce", lambda values, _: values.fill_(1.0))
    monkeypatch.setattr(step, "gather_object", lambda values: [*values, (8, math.inf), (5, 0.5)])
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    assert not training.guard.check_step(training.state, [])
    assert said[-1].reason == "the loss of 1 of 2 samples (ids 8)"
