"""Learning-rate schedules: functions of the number of updates, with timm's values to the bit; or the user's own."""

from __future__ import annotations

import hashlib
import math
from array import array
from numbers import Real
from typing import Any

import torch
from accelerate import Accelerator

from accel_train.config.schema import Schedule
from accel_train.data.sources.splits import Splits
from accel_train.errors import UserError
from accel_train.launch.agreement import broadcast_from_main
from accel_train.user_code import Reference, parse_reference, short_name


class Plateau:
    """Counts the decays of the learning rate: one when a metric of the validation split no longer rises.

    timm's own does not save its counters and will be removed. The rule is torch's ReduceLROnPlateau (mode max, without
    a threshold): the rate decays after the first evaluation that makes more than schedule.patience_epochs without a
    better value, counted from the best evaluation or from the last decay. Evaluations in the warm-up do not count.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.best: float | None = None
        self.bad_epochs = 0
        self.decays = 0
        self.epoch = 0
        """The epochs that were done at the last evaluation."""

    def rate(self, base: float) -> float:
        """What the learning rate `base` is after the decays."""
        return max(base * self.schedule.decay**self.decays, min(base, self.schedule.min_lr))

    def step(self, epoch: int, metric: float) -> None:
        """Record the value `metric` after `epoch` epochs, higher if better."""
        since, self.epoch = epoch - self.epoch, epoch
        if epoch <= self.schedule.warmup_epochs:
            return
        if math.isfinite(metric) and (self.best is None or metric > self.best):
            self.best, self.bad_epochs = metric, 0
        else:
            self.bad_epochs += since
        if self.bad_epochs > self.schedule.patience_epochs:
            self.decays, self.bad_epochs = self.decays + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "bad_epochs": self.bad_epochs, "decays": self.decays, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        best = state_dict["best"]
        self.best, self.bad_epochs = None if best is None else float(best), int(state_dict["bad_epochs"])
        self.decays, self.epoch = int(state_dict["decays"]), int(state_dict["epoch"])


class LearningRate:
    """The learning rates of a run of so many `updates`: `step_update(n)` sets those of update n, counted from 0.

    Call it before each update. The rates are a function of n alone, so that nothing needs to be saved; only plateau has
    a state (`state_dict`), which `step(epochs_done, metric)` changes after an evaluation, and a user's own schedule one
    that says which factors it had.

    During the warm-up the rate rises in a straight line from warmup_lr (at update 0). step, multistep and plateau count
    their epochs from the start of the run; cosine and poly fall from the end of the warm-up (without warmup_prefix: as
    if from the start) to min_lr where the run ends. The `factors` of a user's own (see `own_factors`), one for each
    update, multiply the rates with their warm-up.
    """

    def __init__(
        self,
        schedule: Schedule,
        optimizer: torch.optim.Optimizer,
        *,
        updates: int,
        updates_per_epoch: int,
        factors: array[float] | None = None,
    ) -> None:
        self.schedule, self.optimizer, self.updates_per_epoch = schedule, optimizer, updates_per_epoch
        self.warmup = round(schedule.warmup_epochs * updates_per_epoch)
        self.updates, self.factors = updates, factors
        self.interval = updates_per_epoch if schedule.per == "epoch" else 1
        self.plateau = Plateau(schedule)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])  # as torch's and timm's schedules have it
        self.base_values = [float(group["initial_lr"]) for group in optimizer.param_groups]
        self.update = 0
        """The update, counted from 0, whose rates the optimizer has."""
        self.last_lr = 0.0
        """The highest learning rate of all parameter groups in the update before that."""
        self.step_update(0)

    def _rate(self, t: int, base: float) -> float:
        """The learning rate at update t, counted from 0, of a group whose own is `base`; without its `lr_scale`."""
        schedule, rate = self.schedule, base
        if t < self.warmup:
            rate = schedule.warmup_lr + t * ((base - schedule.warmup_lr) / self.warmup)
        elif schedule.name in ("cosine", "poly"):
            rate = self._falling(t, base)
        elif schedule.name in ("step", "multistep"):
            rate = base * schedule.decay ** self._decays(t)
        elif schedule.name == "plateau":
            rate = self.plateau.rate(base)
        if self.factors is not None:
            rate *= self.factors[min(t, len(self.factors) - 1)]  # the rates after the last update are never used
        return rate

    def _falling(self, t: int, base: float) -> float:
        """The rate of cosine and poly after the warm-up."""
        schedule, lowest = self.schedule, self.schedule.min_lr
        begin = self.warmup if schedule.warmup_prefix else 0
        # At least 2, as with timm: in a run of one update the rate does not matter after that.
        done, length = t - begin, max(self.updates - begin, 2)
        if done >= length:
            return lowest
        if schedule.name == "poly":
            return lowest + (base - lowest) * (1 - done / length)
        return lowest + 0.5 * (base - lowest) * (1 + math.cos(math.pi * done / length))

    def _decays(self, t: int) -> int:
        """How often step and multistep have decayed the rate at update t."""
        schedule, epoch = self.schedule, self.updates_per_epoch
        if schedule.name == "multistep":
            # 1 is added on both sides, as timm does: a product that was rounded up is then no update late.
            return sum(milestone * epoch + 1 <= t + 1 for milestone in schedule.milestones)
        interval = schedule.step_epochs * epoch
        # Asked only where epochs begin, one that was rounded up would be an epoch late; so would 0.1 * 3 > 0.3.
        interval = interval * (1 - 1e-12) if schedule.per == "epoch" else max(round(interval), 1)
        return int(t // interval)

    def step_update(self, update: int) -> None:
        """Set the learning rate of update number `update`, counted from 0."""
        self.last_lr = max(float(group["lr"]) for group in self.optimizer.param_groups)
        self.update = update
        update = update // self.interval * self.interval
        for group, base in zip(self.optimizer.param_groups, self.base_values, strict=True):
            group["lr"] = self._rate(update, base) * group.get("lr_scale", 1.0)

    def step(self, epoch: int, metric: float) -> None:
        """Record the value `metric` after `epoch` epochs, higher if better; the next update's rate follows from it."""
        self.plateau.step(epoch, metric)
        self.step_update(self.update)

    def state_dict(self) -> dict[str, Any]:
        if self.factors is None:
            return self.plateau.state_dict()
        return {"updates": self.update, "factors": self._digest(self.update)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises UserError if a user's own schedule had other factors in the updates that are done."""
        if self.factors is None:
            self.plateau.load_state_dict(state_dict)
        elif self._digest(done := state_dict["updates"]) != state_dict["factors"]:
            raise UserError(
                f"--schedule.name {short_name('schedule.name', self.schedule.name)}: in the {done} updates that are "
                "done, the learning rates were others: the code, or what it reads, has changed. Give it as it was, or "
                "go on with the new ones: --allow-change schedule.name."
            )

    def _digest(self, updates: int) -> str:
        assert self.factors is not None
        return hashlib.sha256(self.factors[:updates].tobytes()).hexdigest()


def own_factors(
    schedule: Schedule, accelerator: Accelerator, *, updates: int, updates_per_epoch: int
) -> array[float] | None:
    """The factor of the learning rate at each update, by the user's own function of (epoch, epochs); None without one.

    The main process computes all of them before the first update: they are a function of the update's number even if
    the function is none. Collective. Raises UserError if one is no number, not finite or negative.
    """
    reference = parse_reference("schedule.name", schedule.name)
    if reference is None:
        return None
    return broadcast_from_main(accelerator, lambda: _compute_factors(reference, updates, updates_per_epoch))


def _compute_factors(reference: Reference, updates: int, updates_per_epoch: int) -> array[float]:
    from accel_train.user_code import load, showing_user_lines

    factor, epochs = load("schedule.name", reference), updates / updates_per_epoch
    found = array("d")
    for update in range(updates):
        epoch = update / updates_per_epoch
        with showing_user_lines("schedule.name", reference):
            value = factor(epoch, epochs)
        number = float(value) if isinstance(value, Real) else math.nan
        if not (math.isfinite(number) and number >= 0):
            raise UserError(
                f"--schedule.name {reference.short}: returned {str(value)[:40]} for epoch {epoch:g} of {epochs:g}; "
                "expected a finite number that is not negative, which multiplies optim.lr."
            )
        found.append(number)
    return found


def check_schedule(schedule: Schedule, splits: Splits) -> None:
    """Raise UserError if the schedule needs a validation split and the data has none."""
    if schedule.name == "plateau" and splits.validation is None:
        raise UserError(
            "--schedule.name plateau: the learning rate follows the validation split, but this data has no "
            "validation split: set one aside with --data.val-fraction 0.1, or choose another schedule."
        )
