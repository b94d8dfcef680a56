"""Learning-rate schedules: functions of the number of updates, made by timm."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import torch
from timm.scheduler import (
    CosineLRScheduler,
    MultiStepLRScheduler,
    PolyLRScheduler,
    StepLRScheduler,
    TanhLRScheduler,
)
from timm.scheduler.scheduler import Scheduler

from accel_train.config.declaration import CYCLIC
from accel_train.config.schema import Schedule
from accel_train.data.sources.splits import Splits
from accel_train.errors import UserError
from accel_train.optim.optimizer import BIASES, momentum_of, set_momentum


class PlateauScheduler(Scheduler):  # type: ignore[misc]
    """Decays the learning rate when a figure of the validation split no longer rises.

    timm's own does not save its counters and will be removed. This one's state is a few numbers, from which
    the rate of any update follows. The rule is torch's ReduceLROnPlateau (mode max, a relative threshold): the rate
    decays after the first evaluation that makes more than `patience` epochs without a better figure, counted
    from the best evaluation or from the last decay.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        decay: float,
        patience: int,
        threshold: float,
        min_lr: float,
        warmup_epochs: float,
        warmup_updates: int,
        warmup_lr: float,
    ) -> None:
        super().__init__(optimizer, param_group_field="lr", t_in_epochs=False)
        self.decay, self.patience, self.threshold, self.min_lr = decay, patience, threshold, min_lr
        self.warmup_updates, self.warmup_lr = warmup_updates, warmup_lr
        self.best: float | None = None
        self.bad_epochs = 0
        self.decays = 0
        # Evaluations until then do not count, as in timm. 0 in a run whose checkpoint does not have the number: earlier
        # versions counted them, and such a run continues to do so.
        self.warmup_epochs = warmup_epochs
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
        if epoch <= self.warmup_epochs:
            self.epoch = epoch
            return
        if math.isfinite(metric) and (self.best is None or metric > self._to_surpass(self.best)):
            self.best, self.bad_epochs = metric, 0
        else:
            self.bad_epochs += 1 if self.epoch is None else epoch - self.epoch
        if self.epoch is not None:
            self.epoch = epoch
        if self.bad_epochs > self.patience:
            self.decays, self.bad_epochs = self.decays + 1, 0

    def _to_surpass(self, best: float) -> float:
        return best * (1 + math.copysign(self.threshold, best))  # a loss counts with a minus here

    def state_dict(self) -> dict[str, Any]:
        counts = {"bad_epochs": self.bad_epochs, "decays": self.decays, "epoch": self.epoch}
        return {"best": self.best, **counts, "warmup_epochs": self.warmup_epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.bad_epochs = state_dict["best"], state_dict["bad_epochs"]
        self.decays, self.epoch = state_dict["decays"], state_dict.get("epoch")
        if not state_dict.get("warmup_epochs"):
            self.warmup_epochs = 0


class OneCycleScheduler(Scheduler):  # type: ignore[misc]
    """Up to the learning rate and down to the lowest one, both as a cosine, as torch's OneCycleLR does (L. Smith 2018,
    arxiv.org/abs/1803.09820)."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, updates: int, warmup: int, warmup_lr: float, min_lr: float
    ) -> None:
        super().__init__(optimizer, param_group_field="lr", t_in_epochs=False)
        self.updates, self.warmup, self.warmup_lr, self.min_lr = updates, warmup, warmup_lr, min_lr

    def value(self, t: int, first: float, middle: float, last: float) -> float:
        """What goes from `first` to `middle` in the warm-up, and then to `last`, at update `t`."""
        peak = max(self.warmup - 1, 0)
        start, end, share = first, middle, t / max(peak, 1)
        if t >= peak:
            start, end, share = middle, last, min((t - peak) / max(self.updates - 1 - peak, 1), 1.0)
        return end + (start - end) / 2 * (1 + math.cos(math.pi * share))

    def _get_lr(self, t: int) -> list[float]:
        return [self.value(t, self.warmup_lr, base, self.min_lr) for base in self.base_values]


class AdjustedScheduler(Scheduler):  # type: ignore[misc]
    """Another schedule, `made`, at the beginnings of epochs only, with a constant warm-up, with restarts until its
    cooldown, or with a momentum and a rate of biases that move.

    Each is a function of the update, too.
    """

    def __init__(
        self,
        made: Scheduler,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        *,
        warmup: int,
        epoch: int,
        end: int,
    ) -> None:
        """`epoch`: its updates; `end`: the update at which a cooldown begins. Raises UserError if a momentum is to
        move and the optimizer has none."""
        super().__init__(optimizer, param_group_field="lr", t_in_epochs=False)
        self.made, self.schedule, self.warmup, self.end = made, schedule, warmup, end
        self.interval = epoch if schedule.per == "epoch" else 1
        self.momenta = [momentum_of(group) for group in optimizer.param_groups]
        self.moves = schedule.warmup_momentum is not None or schedule.cycle_momentum is not None
        if self.moves and all(momentum is None for momentum in self.momenta):
            option = "cycle" if schedule.warmup_momentum is None else "warmup"
            raise UserError(f"schedule.{option}-momentum: this optimizer has no momentum; leave it out.")

    def _get_lr(self, t: int) -> list[float]:
        if self.schedule.restarts and self.schedule.cooldown_epochs > 0 and t >= self.end:
            return [self.schedule.min_lr for _ in self.base_values]
        return cast(list[float], self.made._get_lr(t))

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        t = num_updates // self.interval * self.interval
        if self.schedule.warmup_method == "constant" and t < self.warmup:
            t = 0
        super().step_update(t)
        groups, start = self.optimizer.param_groups, self.schedule.warmup_bias_lr
        if start is not None and t < self.warmup:
            for group, base in zip(groups, self.base_values, strict=True):
                if group.get(BIASES):
                    group["lr"] = (start + (base - start) * t / self.warmup) * group.get("lr_scale", 1.0)
        for group, momentum in zip(groups, self.momenta, strict=True):
            if self.moves and momentum is not None:
                set_momentum(group, self._momentum_at(num_updates, momentum))

    def _momentum_at(self, t: int, end: float) -> float:
        if isinstance(self.made, OneCycleScheduler) and self.schedule.cycle_momentum is not None:
            return self.made.value(t, end, self.schedule.cycle_momentum, end)
        start = self.schedule.warmup_momentum
        return end if start is None or t >= self.warmup else start + (end - start) * t / self.warmup

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.made.step(epoch, metric)

    def state_dict(self) -> dict[str, Any]:
        return cast(dict[str, Any], self.made.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.made.load_state_dict(state_dict)


class ScaledWarmup(AdjustedScheduler):
    """Rises at each update from the first rate to the one that the schedule `made`, without a warm-up, has meanwhile.
    As ultralytics' engine/trainer.py: np.interp(ni, [0, nw], [warmup_bias_lr or 0, initial_lr * lf(epoch)])."""

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self.made.step_update(num_updates, metric)
        share = min(num_updates / self.warmup, 1.0)
        for group, momentum in zip(self.optimizer.param_groups, self.momenta, strict=True):
            own = self.schedule.warmup_bias_lr if group.get(BIASES) else None
            start = (self.schedule.warmup_lr if own is None else own) * group.get("lr_scale", 1.0)
            if share < 1:
                group["lr"] = start + (group["lr"] - start) * share
            if self.moves and momentum is not None:
                set_momentum(group, self._momentum_at(num_updates, momentum))


def check_schedule(schedule: Schedule, splits: Splits) -> None:
    """Raise UserError if the schedule needs a validation split and the data has none."""
    if schedule.name == "plateau" and splits.validation is None:
        raise UserError(
            "--schedule.name plateau: the learning rate follows the validation split, but this data has no "
            "validation split: set one aside with --data.val-fraction 0.1, or choose another schedule."
        )


def create_schedule(
    schedule: Schedule, optimizer: torch.optim.Optimizer, *, updates: int, updates_per_epoch: int
) -> Scheduler:
    """The learning rates of a run of so many updates: `step_update(n)` sets those of update n, counted from 0.

    Call it before each update. The rates are a function of n alone, so that nothing needs to be saved; only
    plateau has a state (`state_dict`), which `step(epochs_done, figure)` changes after an
    evaluation.

    During the warm-up the rate rises in a straight line from warmup_lr (at update 0), or it stays there. step,
    multistep and plateau count their epochs from the start of the run; cosine, tanh and poly fall from the end of the
    warm-up (without warmup_prefix: as if from the start) to min_lr where the run ends, or its cooldown_epochs begin.
    Raises UserError if a momentum is to change and the optimizer has none, or if cycles become too short too early.
    """
    warmup = round(schedule.warmup_epochs * updates_per_epoch)
    made: Scheduler
    if schedule.warmup_method == "scaled" and warmup:
        return _with_scaled_warmup(schedule, optimizer, updates, updates_per_epoch, warmup)
    shared: dict[str, Any] = {"t_in_epochs": False, "warmup_t": warmup, "warmup_lr_init": schedule.warmup_lr}
    end = updates - math.floor(schedule.cooldown_epochs * updates_per_epoch + 1e-9)  # 0.1 * 30 may be below 3
    if schedule.name == "constant":
        made = StepLRScheduler(optimizer, decay_t=1, decay_rate=1.0, warmup_prefix=False, **shared)
    elif schedule.name == "step":
        interval = schedule.step_epochs * updates_per_epoch
        # Asked only where epochs begin, one that was rounded up would be an epoch late; so would 0.1 * 3 > 0.3.
        interval = interval * (1 - 1e-12) if schedule.per == "epoch" else max(round(interval), 1)
        made = StepLRScheduler(optimizer, decay_t=interval, decay_rate=schedule.decay, warmup_prefix=False, **shared)
    elif schedule.name == "multistep":
        # timm applies a milestone one index early (on purpose, says its source), and an index here is an
        # update.
        milestones = [epoch * updates_per_epoch + 1 for epoch in schedule.milestones]
        made = MultiStepLRScheduler(
            optimizer, decay_t=milestones, decay_rate=schedule.decay, warmup_prefix=False, **shared
        )
    elif schedule.name in CYCLIC:
        made = _create_cyclic(schedule, optimizer, end=end, updates_per_epoch=updates_per_epoch, shared=shared)
    elif schedule.name == "one_cycle":
        rates = {"warmup_lr": schedule.warmup_lr, "min_lr": schedule.min_lr}
        made = OneCycleScheduler(optimizer, updates=end, warmup=warmup, **rates)
    else:
        made = PlateauScheduler(
            optimizer,
            decay=schedule.decay,
            patience=schedule.patience_epochs,
            threshold=schedule.threshold,
            min_lr=schedule.min_lr,
            warmup_epochs=schedule.warmup_epochs,
            warmup_updates=warmup,
            warmup_lr=schedule.warmup_lr,
        )
    moving = (schedule.warmup_bias_lr, schedule.warmup_momentum, schedule.cycle_momentum)
    adjusted = schedule.per == "epoch" or schedule.warmup_method == "constant" or schedule.restarts
    if adjusted or any(value is not None for value in moving):
        made = AdjustedScheduler(made, optimizer, schedule, warmup=warmup, epoch=updates_per_epoch, end=end)
    made.step_update(0)  # the constructors do not apply the groups' lr_scale
    return made


def _create_cyclic(
    schedule: Schedule, optimizer: torch.optim.Optimizer, *, end: int, updates_per_epoch: int, shared: dict[str, Any]
) -> Scheduler:
    """cosine, tanh or poly: it falls once until update `end`, or in cycles (SGDR: Loshchilov and Hutter 2016,
    arxiv.org/abs/1608.03983). `shared`: what all of timm's schedules are given."""
    # At least 2: with 1 timm warns that the schedule has no effect, and in a run of one update that is expected.
    fall = max(end - shared["warmup_t"] if schedule.warmup_prefix else end, 2)
    shared = {**shared, "t_initial": fall, "lr_min": schedule.min_lr, "warmup_prefix": schedule.warmup_prefix}
    if schedule.cycle_epochs is not None:
        first, factor = schedule.cycle_epochs * updates_per_epoch, schedule.cycle_mul
        if (1 - factor) * fall >= first:
            raise UserError(
                f"--schedule.cycle-mul {factor:g}: cycles that begin with {schedule.cycle_epochs:g} epochs and become "
                f"shorter end after {schedule.cycle_epochs / (1 - factor):g}, before the run; use a larger one, or "
                "fewer epochs."
            )
        shared |= {"t_initial": first, "cycle_mul": factor, "cycle_decay": schedule.cycle_decay}
        shared["cycle_limit"] = math.inf  # AdjustedScheduler ends them
    if schedule.name == "tanh":
        return TanhLRScheduler(optimizer, **shared)
    if schedule.name == "poly":
        return PolyLRScheduler(optimizer, power=schedule.power, k_decay=schedule.k_decay, **shared)
    return CosineLRScheduler(optimizer, k_decay=schedule.k_decay, **shared)


def _with_scaled_warmup(
    schedule: Schedule, optimizer: torch.optim.Optimizer, updates: int, updates_per_epoch: int, warmup: int
) -> Scheduler:
    """The schedule without its warm-up, and a warm-up of `warmup` updates that scales it."""
    if schedule.name == "one_cycle":
        raise UserError("schedule.warmup-method scaled: leave it out with one_cycle, whose rise is a part of it.")
    rest = replace(schedule, warmup_epochs=0.0, warmup_prefix=False, warmup_method="linear")
    rest = replace(rest, warmup_bias_lr=None, warmup_momentum=None)
    made = create_schedule(rest, optimizer, updates=updates, updates_per_epoch=updates_per_epoch)
    scaled = ScaledWarmup(made, optimizer, schedule, warmup=warmup, epoch=updates_per_epoch, end=updates)
    scaled.step_update(0)
    return scaled
