"""Learning rates and EMA over whole trainings, each value as in the code of timm, torch and torchvision."""

from __future__ import annotations

from typing import Any

import pytest
import timm.scheduler
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel

from accel_train.config.schema import Ema, Schedule
from accel_train.optim.ema import create_ema, update_ema
from accel_train.optim.schedule import LearningRate

EPOCHS, UPDATES = 12, 7


def sgd(momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4, momentum=momentum)


def values(schedule: Schedule, optimizer: torch.optim.Optimizer, epochs: int = EPOCHS) -> list[dict[str, Any]]:
    """Return the optimizer's first group at each update, drawn out of order: each is a function of its number."""
    made = LearningRate(schedule, optimizer, updates=epochs * UPDATES, updates_per_epoch=UPDATES)
    found: dict[int, dict[str, Any]] = {}
    for update in sorted(range(epochs * UPDATES), key=lambda update: (update * 5) % 11):
        made.step_update(update)
        found[update] = dict(optimizer.param_groups[0])
    return [found[update] for update in sorted(found)]


def rates_of_timm(per: str, **options: Any) -> list[float]:
    """The rate of each update of a training by timm's train.py with these options of `create_scheduler_v2`."""
    theirs = sgd()
    scheduler, epochs = timm.scheduler.create_scheduler_v2(
        theirs, step_on_epochs=per == "epoch", updates_per_epoch=UPDATES, **options
    )
    # As timm's train.py: step(epoch + 1) after an epoch, step_update after each update.
    expected, number = [], 0
    scheduler.step(0) if per == "epoch" else scheduler.step_update(0)
    for epoch in range(epochs):
        for _ in range(UPDATES):
            expected.append(theirs.param_groups[0]["lr"])
            number += 1
            scheduler.step_update(num_updates=number)
        scheduler.step(epoch + 1)
    return expected


@pytest.mark.parametrize("per", ["epoch", "update"])
@pytest.mark.parametrize(
    ("name", "prefix"),  # step counts from the start of the run here
    [*((name, prefix) for name in ("cosine", "poly") for prefix in (False, True)), ("step", False)],
)
def test_rates_are_those_of_timms_training(name: str, prefix: bool, per: str) -> None:
    expected = rates_of_timm(
        per,
        sched=name,
        num_epochs=EPOCHS,
        decay_epochs=3,
        decay_rate=1.0 if name == "poly" else 0.5,  # timm's power of poly
        cooldown_epochs=0,
        warmup_epochs=3,
        warmup_lr=0.01,
        min_lr=0.02,
        warmup_prefix=prefix,
    )
    common: dict[str, Any] = {"warmup_epochs": 3, "warmup_lr": 0.01, "min_lr": 0.02}
    schedule = Schedule(name=name, per=per, warmup_prefix=prefix, step_epochs=3, decay=0.5, **common)  # type: ignore[arg-type]
    epochs = len(expected) // UPDATES
    assert [group["lr"] for group in values(schedule, sgd(), epochs)] == pytest.approx(expected, rel=1e-12)


@pytest.mark.filterwarnings("ignore:PlateauLRScheduler is deprecated")
@settings(max_examples=100, deadline=None)
@given(
    figures=st.lists(st.sampled_from([0.5, 0.5 * 1.0001, 0.50004, 0.50006, 0.6, 0.4]), min_size=20, max_size=20),
    warmup=st.integers(0, 3),
    patience=st.integers(0, 3),
    lower=st.booleans(),
)
def test_plateau_is_timms(figures: list[float], warmup: int, patience: int, lower: bool) -> None:
    theirs, ours = sgd(), sgd()
    scheduler = timm.scheduler.PlateauLRScheduler(
        theirs,
        decay_rate=0.5,
        patience_t=patience,
        threshold=0.0,
        lr_min=0.01,
        warmup_t=warmup,
        warmup_lr_init=0.02,
        mode="min" if lower else "max",
    )
    schedule = Schedule(
        name="plateau",
        per="epoch",
        decay=0.5,
        patience_epochs=patience,
        min_lr=0.01,
        warmup_epochs=warmup,
        warmup_lr=0.02,
    )
    made = LearningRate(schedule, ours, updates=20 * UPDATES, updates_per_epoch=UPDATES)
    for epoch, figure in enumerate(figures):
        for update in range(UPDATES):
            made.step_update(epoch * UPDATES + update)
            assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-9)
        scheduler.step(epoch + 1, figure)
        made.step(epoch + 1, -figure if lower else figure)  # as `evaluate` in train.py


@pytest.mark.parametrize("warmup", [0, 2])
def test_the_ema_is_torchvisions(warmup: int) -> None:
    """references/classification: ExponentialMovingAverage, and train_one_epoch, which updates it."""
    ours_model, steps, batch, decay = nn.Linear(2, 1, bias=False), 3, 10, 0.98
    alpha = min(1.0, (1.0 - decay) * batch * steps / EPOCHS)
    theirs = AveragedModel(ours_model, avg_fn=lambda old, new, _: (1.0 - alpha) * old + alpha * new)
    options = Ema(enabled=True, decay=decay, every_updates=steps, scale_decay=True, after_epochs=warmup)
    ours = create_ema(options, ours_model, updates_per_epoch=UPDATES, batch_size=batch, epochs=EPOCHS)
    assert ours is not None and ours.decay == pytest.approx(1 - alpha)
    torch.manual_seed(0)
    for epoch in range(EPOCHS):
        for i in range(UPDATES):
            ours_model.weight.data.normal_()
            update_ema(ours, ours_model, epoch * UPDATES + i + 1)
            if i % steps == 0:
                theirs.update_parameters(ours_model)
                if epoch < warmup:
                    theirs.n_averaged.fill_(0)
            torch.testing.assert_close(ours.module.weight, theirs.module.weight)


def test_the_ema_is_timms_to_the_bit() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    theirs = ModelEmaV3(model, decay=0.99)
    ours = create_ema(Ema(enabled=True, decay=0.99), model, updates_per_epoch=UPDATES)
    assert ours is not None
    torch.manual_seed(0)
    for update in range(1, 60):
        for parameter in model.parameters():
            parameter.data.normal_()
        model.get_buffer("1.num_batches_tracked").add_(1)
        update_ema(ours, model, update)
        theirs.update(model, step=update)  # as timm's train.py does
        pairs = zip(ours.module.state_dict().values(), theirs.module.state_dict().values(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
