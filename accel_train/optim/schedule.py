"""Learning-rate schedules: functions of the number of updates, made by timm."""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler, StepLRScheduler
from timm.scheduler.scheduler import Scheduler

from accel_train.config.schema import Schedule
from accel_train.data.sources.splits import Splits
from accel_train.errors import UserError


class PlateauScheduler(Scheduler):  # type: ignore[misc]
    """Decays the learning rate when a figure of the validation split no longer rises.

    timm's own does not save its counters and will be removed. This one's state is a few numbers, from which
    the rate of any update follows. The rule is torch's ReduceLROnPlateau (mode max, threshold 0): the rate
    decays after the first evaluation that makes more than `patience` epochs without a better figure, counted
    from the best evaluation or from the last decay.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        decay: float,
        patience: int,
        min_lr: float,
        warmup_updates: int,
        warmup_lr: float,
    ) -> None:
        super().__init__(optimizer, param_group_field="lr", t_in_epochs=False)
        self.decay, self.patience, self.min_lr = decay, patience, min_lr
        self.warmup_updates, self.warmup_lr = warmup_updates, warmup_lr
        self.best: float | None = None
        self.bad_epochs = 0
        self.decays = 0
        # The epochs that were done at the last evaluation. None in a run whose checkpoint does not have the number:
        # earlier versions counted evaluations instead of epochs, and such a run continues to do so.
        self.epoch: int | None = 0

    def _get_lr(self, t: int) -> list[float]:
        if t < self.warmup_updates:
            return [self.warmup_lr + t * (base - self.warmup_lr) / self.warmup_updates for base in self.base_values]
        return [max(base * self.decay**self.decays, min(base, self.min_lr)) for base in self.base_values]

    def step(self, epoch: int, metric: float | None = None) -> None:
        """Record the figure `metric` after `epoch` epochs, higher if better; the next `step_update` uses it."""
        if metric is None:
            return
        if math.isfinite(metric) and (self.best is None or metric > self.best):
            self.best, self.bad_epochs = metric, 0
        else:
            self.bad_epochs += 1 if self.epoch is None else epoch - self.epoch
        if self.epoch is not None:
            self.epoch = epoch
        if self.bad_epochs > self.patience:
            self.decays, self.bad_epochs = self.decays + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "bad_epochs": self.bad_epochs, "decays": self.decays, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.bad_epochs = state_dict["best"], state_dict["bad_epochs"]
        self.decays, self.epoch = state_dict["decays"], state_dict.get("epoch")


def check_schedule(schedule: Schedule, splits: Splits) -> None:
    """Raise UserError if the schedule needs a validation split and the data has none."""
    if schedule.name == "plateau" and splits.validation is None:
        raise UserError(
            "--schedule.name plateau: the learning rate follows the validation split, but this data has no "
            "validation split: set one aside with --data.val-fraction 0.1, or choose another schedule."
        )


def create_schedule(
    schedule: Schedule, optimizer: torch.optim.Optimizer, *, epochs: int, updates_per_epoch: int
) -> Scheduler:
    """The learning rates of a run: `step_update(n)` sets those of update n, counted from 0 over all epochs.

    Call it before each update. The rates are a function of n alone, so that nothing needs to be saved; only
    plateau has a state (`state_dict`), which `step(epochs_done, figure)` changes after an
    evaluation.

    During the warm-up the rate rises in a straight line from warmup_lr (at update 0). step, multistep and
    plateau count their epochs from the start of the run; cosine and poly fall from the end of the warm-up to
    min_lr at the end of the run.
    """
    warmup = round(schedule.warmup_epochs * updates_per_epoch)
    shared: dict[str, Any] = {"t_in_epochs": False, "warmup_t": warmup, "warmup_lr_init": schedule.warmup_lr}
    # At least 2: with 1 timm warns that the schedule has no effect, and in a run of one update that is expected.
    fall = max(epochs * updates_per_epoch - warmup, 2)
    made: Scheduler
    if schedule.name == "constant":
        made = StepLRScheduler(optimizer, decay_t=1, decay_rate=1.0, warmup_prefix=False, **shared)
    elif schedule.name == "step":
        interval = max(round(schedule.step_epochs * updates_per_epoch), 1)
        made = StepLRScheduler(optimizer, decay_t=interval, decay_rate=schedule.decay, warmup_prefix=False, **shared)
    elif schedule.name == "multistep":
        # timm applies a milestone one index early (on purpose, says its source), and an index here is an
        # update.
        milestones = [epoch * updates_per_epoch + 1 for epoch in schedule.milestones]
        made = MultiStepLRScheduler(
            optimizer, decay_t=milestones, decay_rate=schedule.decay, warmup_prefix=False, **shared
        )
    elif schedule.name == "cosine":
        made = CosineLRScheduler(optimizer, t_initial=fall, lr_min=schedule.min_lr, warmup_prefix=True, **shared)
    elif schedule.name == "poly":
        made = PolyLRScheduler(
            optimizer,
            t_initial=fall,
            lr_min=schedule.min_lr,
            power=schedule.power,
            warmup_prefix=True,
            **shared,
        )
    else:
        made = PlateauScheduler(
            optimizer,
            decay=schedule.decay,
            patience=schedule.patience_epochs,
            min_lr=schedule.min_lr,
            warmup_updates=warmup,
            warmup_lr=schedule.warmup_lr,
        )
    made.step_update(0)  # the constructors do not apply the groups' lr_scale
    return made
