"""The largest micro-batch that fits is the same on all processes; a trial leaves no trace."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from accel_train.config.schema import Optim
from accel_train.data.order.plan import Plan
from accel_train.errors import UserError
from accel_train.models.classifier import find_classifier
from accel_train.optim.optimizer import create_optimizer
from accel_train.optim.performance import as_in_training, evaluation_advice, memory_advice, training_advice


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw", "adagrad", "lamb", "muon"])
def test_a_trial_leaves_no_trace(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 8))
    model[0].weight.requires_grad_(False)
    find_classifier(model, 8, 1, 8)  # muon asks for it
    optimizer = create_optimizer(Optim(name=name, lr=0.1, weight_decay=0.1), model)

    def update() -> None:
        model(torch.randn(4, 1, 8, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def everything() -> list[object]:
        state = optimizer.state_dict()
        numbers = [*model.state_dict().values(), *(v for each in state["state"].values() for v in each.values())]
        bits = [value.numpy().tobytes() if isinstance(value, torch.Tensor) else value for value in numbers]
        groups = repr(state["param_groups"])
        draws = torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(np.random.get_state())
        return [bits, groups, draws, model[1].training, [parameter.grad for parameter in model.parameters()]]

    for _ in range(2):  # of a new optimizer, and of one that has made a step
        before = copy.deepcopy(everything())
        with pytest.raises(RuntimeError, match="stop"), as_in_training(model, optimizer, torch.device("cpu")):
            model.train()
            update()
            random.random(), np.random.rand()
            raise RuntimeError("stop")
        assert everything() == before
        update()


def test_advice_names_a_number_that_is_possible() -> None:
    plan = Plan(1000, 96, 2, 2, virtual_batch=8)  # of 48 samples of a process 24 at once; possible: 8, 16, 24, 48
    assert "with 24 images of a process at once: give --micro-batch-size 8," in training_advice(plan)
    smallest = Plan(1000, 96, 2, 6, virtual_batch=8)
    assert "which cannot be fewer: use --model.gradient-checkpointing true" in training_advice(smallest)
    assert evaluation_advice(256).endswith("give --eval-batch-size 128")
    assert "gradient-checkpointing" in evaluation_advice(1)
    with pytest.raises(UserError, match=r"^out of memory in training, .*\.$"), memory_advice(training_advice(plan)):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with pytest.raises(RuntimeError, match="shapes"), memory_advice("never"):
        raise RuntimeError("shapes do not fit")
