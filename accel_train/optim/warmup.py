"""A warm-up that scales the learning rate of a schedule."""

from __future__ import annotations

from typing import Any, cast

import torch
from timm.scheduler.scheduler import Scheduler

from accel_train.config.schema import Schedule
from accel_train.errors import UserError
from accel_train.optim.optimizer import BIASES, momentum_of, set_momentum


class ScaledWarmup(Scheduler):  # type: ignore[misc]
    """Rises at each update from the first rate to the one that the schedule `made` has meanwhile; a function of the
    update. As ultralytics' engine/trainer.py: np.interp(ni, [0, nw], [warmup_bias_lr or 0, initial_lr * lf(epoch)])."""

    def __init__(self, made: Scheduler, optimizer: torch.optim.Optimizer, schedule: Schedule, *, warmup: int) -> None:
        """`made`: without a warm-up of its own. `warmup`: updates. Raises UserError if a momentum is to move and the
        optimizer has none."""
        super().__init__(optimizer, param_group_field="lr", t_in_epochs=False)
        self.made, self.schedule, self.warmup = made, schedule, warmup
        self.momenta = [momentum_of(group) for group in optimizer.param_groups]
        if schedule.warmup_momentum is not None and all(momentum is None for momentum in self.momenta):
            raise UserError("schedule.warmup-momentum: this optimizer has no momentum; leave it out.")

    def _get_lr(self, t: int) -> list[float]:
        return cast(list[float], self.made._get_lr(t))

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self.made.step_update(num_updates, metric)
        share, first = min(num_updates / self.warmup, 1.0), self.schedule.warmup_momentum
        for group, momentum in zip(self.optimizer.param_groups, self.momenta, strict=True):
            own = self.schedule.warmup_bias_lr if group.get(BIASES) else None
            start = (self.schedule.warmup_lr if own is None else own) * group.get("lr_scale", 1.0)
            if share < 1:
                group["lr"] = start + (group["lr"] - start) * share
            if first is not None and momentum is not None:
                set_momentum(group, first + (momentum - first) * share)

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.made.step(epoch, metric)

    def state_dict(self) -> dict[str, Any]:
        return cast(dict[str, Any], self.made.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.made.load_state_dict(state_dict)
