"""meter.py: what is counted while training, whenever it is summed."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

from accel_train.records.meter import Meter
from accel_train.task import ONE_LABEL


@pytest.mark.parametrize("updates", [0, 1, 70])
@pytest.mark.parametrize("mixed", [False, True])
def test_it_counts_the_samples_of_committed_updates(updates: int, mixed: bool) -> None:
    meter, numbers = Meter(Accelerator(cpu=True), ONE_LABEL), torch.Generator().manual_seed(updates)
    for _ in range(2):  # each reading begins anew
        loss_sum, correct, samples = 0.0, 0, 0
        for update in range(updates):
            for _ in range(2):
                logits, losses = (torch.randn(shape, generator=numbers) for shape in ((5, 3), (5,)))
                labels = torch.randint(3, (5,), generator=numbers)
                weights = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
                targets = torch.nn.functional.one_hot(labels, 3) * 0.9 if mixed else labels
                meter.add(logits, targets, losses * weights, weights)
                if update % 3 != 2:
                    loss_sum += losses[:4].double().sum().item()
                    correct += int((logits.argmax(1) == labels)[:4].sum())
                    samples += 4
            if update % 3 == 2:
                meter.discard()
            else:
                meter.commit()
        sums = meter.reduce()
        assert (sums.totals["accuracy"], sums.samples) == (correct, samples)
        assert sums.totals["loss"] == pytest.approx(loss_sum, abs=1e-4)
