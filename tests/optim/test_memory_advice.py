"""What to do if the memory of a device is too small names a number that is possible."""

from __future__ import annotations

import pytest
import torch

from accel_train.data.order.plan import Plan
from accel_train.errors import UserError
from accel_train.optim.performance import evaluation_advice, memory_advice, training_advice


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
