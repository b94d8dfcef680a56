"""Learning-rate schedules: functions of the number of updates, most of them timm's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler, StepLRScheduler, TanhLRScheduler

from accel_train.config.schema import Schedule
from accel_train.data.sources.splits import Splits
from accel_train.errors import UserError
from accel_train.optim.optimizer import BIASES, momentum_of, set_momentum

Rates = Callable[[int], list[float]]
"""The learning rate of each of the optimizer's groups at an update, counted from 0; without their `lr_scale`."""


class Plateau:
    """Counts the decays of the learning rate: one when a figure of the validation split no longer rises.

    timm's own does not save its counters and will be removed. The rule is torch's ReduceLROnPlateau (mode max, a
    relative threshold): the rate decays after the first evaluation that makes more than schedule.patience_epochs
    without a better figure, counted from the best evaluation or from the last decay.
    """

    def __init__(self, schedule: Schedule, warmup_epochs: float) -> None:
        self.schedule = schedule
        self.best: float | None = None
        self.bad_epochs = 0
        self.decays = 0
        self.warmup_epochs = warmup_epochs  # evaluations until then do not count, as in timm
        self.epoch = 0  # the epochs that were done at the last evaluation

    def rate(self, base: float) -> float:
        """What the learning rate `base` is after the decays."""
        return max(base * self.schedule.decay**self.decays, min(base, self.schedule.min_lr))

    def step(self, epoch: int, metric: float) -> None:
        """Record the figure `metric` after `epoch` epochs, higher if better."""
        passed, self.epoch = epoch - self.epoch, epoch
        if epoch <= self.warmup_epochs:
            return
        if math.isfinite(metric) and (self.best is None or metric > self._to_surpass(self.best)):
            self.best, self.bad_epochs = metric, 0
        else:
            self.bad_epochs += passed
        if self.bad_epochs > self.schedule.patience_epochs:
            self.decays, self.bad_epochs = self.decays + 1, 0

    def _to_surpass(self, best: float) -> float:
        return best * (1 + math.copysign(self.schedule.threshold, best))  # a loss counts with a minus here

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "bad_epochs": self.bad_epochs, "decays": self.decays, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.bad_epochs = state_dict["best"], state_dict["bad_epochs"]
        self.decays, self.epoch = state_dict["decays"], state_dict["epoch"]


class LearningRate:
    """The learning rates of a run of so many `updates`: `step_update(n)` sets those of update n, counted from 0.

    Call it before each update. The rates are a function of n alone, so that nothing needs to be saved; only plateau has
    a state (`state_dict`), which `step(epochs_done, figure)` changes after an evaluation.

    During the warm-up the rate rises in a straight line from warmup_lr (at update 0), or it stays there, or what the
    schedule has meanwhile without a warm-up is scaled. step, multistep and plateau count their epochs from the start of
    the run; cosine, tanh and poly fall from the end of the warm-up (without warmup_prefix: as if from the start) to
    min_lr where the run ends, or its cooldown_epochs begin. Raises UserError if a momentum is to change and the
    optimizer has none, or if cycles become too short too early.
    """

    def __init__(
        self, schedule: Schedule, optimizer: torch.optim.Optimizer, *, updates: int, updates_per_epoch: int
    ) -> None:
        self.schedule, self.optimizer, self.updates_per_epoch = schedule, optimizer, updates_per_epoch
        self.warmup = round(schedule.warmup_epochs * updates_per_epoch)
        self.scales = schedule.warmup_method == "scaled" and self.warmup > 0
        self.end = updates - math.floor(schedule.cooldown_epochs * updates_per_epoch + 1e-9)  # 0.1 * 30 may be below 3
        self.ends_cycles = schedule.restarts and schedule.cooldown_epochs > 0
        self.interval = updates_per_epoch if schedule.per == "epoch" else 1
        if self.scales and schedule.name == "one_cycle":
            raise UserError("schedule.warmup-method scaled: leave it out with one_cycle, whose rise is a part of it.")
        self.momenta = [momentum_of(group) for group in optimizer.param_groups]
        self.moves = schedule.warmup_momentum is not None or schedule.cycle_momentum is not None
        self.plateau = Plateau(schedule, 0.0 if self.scales else schedule.warmup_epochs)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])  # as torch's and timm's schedules have it
        self.base_values = [float(group["initial_lr"]) for group in optimizer.param_groups]
        self._rates = self._create_rates(0 if self.scales else self.warmup)
        if self.moves and all(momentum is None for momentum in self.momenta):
            option = "cycle" if schedule.warmup_momentum is None else "warmup"
            raise UserError(f"schedule.{option}-momentum: this optimizer has no momentum; leave it out.")
        self.update = 0
        """The update, counted from 0, whose rates the optimizer has."""
        self.step_update(0)

    def _create_rates(self, warmup: int) -> Rates:
        """The rates of the schedule, after a warm-up of so many updates in a straight line."""
        schedule, epoch = self.schedule, self.updates_per_epoch
        shared: dict[str, Any] = {"t_in_epochs": False, "warmup_t": warmup, "warmup_lr_init": schedule.warmup_lr}
        shared["warmup_prefix"] = False
        made: Any
        if schedule.name == "plateau":
            return lambda t: [self._at_plateau(t, warmup, base) for base in self.base_values]
        if schedule.name == "one_cycle":
            return lambda t: [
                self._one_cycle(t, schedule.warmup_lr, base, schedule.min_lr) for base in self.base_values
            ]
        if schedule.name == "constant":
            made = StepLRScheduler(self.optimizer, decay_t=1, decay_rate=1.0, **shared)
        elif schedule.name == "step":
            interval = schedule.step_epochs * epoch
            # Asked only where epochs begin, one that was rounded up would be an epoch late; so would 0.1 * 3 > 0.3.
            interval = interval * (1 - 1e-12) if schedule.per == "epoch" else max(round(interval), 1)
            made = StepLRScheduler(self.optimizer, decay_t=interval, decay_rate=schedule.decay, **shared)
        elif schedule.name == "multistep":
            # timm applies a milestone one index early (on purpose, says its source), and an index here is an update.
            milestones = [milestone * epoch + 1 for milestone in schedule.milestones]
            made = MultiStepLRScheduler(self.optimizer, decay_t=milestones, decay_rate=schedule.decay, **shared)
        else:
            shared |= self._fall(warmup)
            if schedule.name == "tanh":
                made = TanhLRScheduler(self.optimizer, **shared)
            elif schedule.name == "poly":
                made = PolyLRScheduler(self.optimizer, power=schedule.power, k_decay=schedule.k_decay, **shared)
            else:
                made = CosineLRScheduler(self.optimizer, k_decay=schedule.k_decay, **shared)
        return made._get_lr  # type: ignore[no-any-return]

    def _fall(self, warmup: int) -> dict[str, Any]:
        """The arguments of cosine, tanh and poly: they fall once until the end, or in cycles (SGDR: Loshchilov and
        Hutter 2016, arxiv.org/abs/1608.03983)."""
        schedule, first = self.schedule, self.schedule.cycle_epochs
        prefix = schedule.warmup_prefix and not self.scales
        # At least 2: with 1 timm warns that the schedule has no effect, and in a run of one update that is expected.
        fall = max(self.end - warmup if prefix else self.end, 2)
        arguments = {"t_initial": fall, "lr_min": schedule.min_lr, "warmup_prefix": prefix}
        if first is None:
            return arguments
        length, factor = first * self.updates_per_epoch, schedule.cycle_mul
        if (1 - factor) * fall >= length:
            raise UserError(
                f"--schedule.cycle-mul {factor:g}: cycles that begin with {first:g} epochs and become shorter end "
                f"after {first / (1 - factor):g}, before the run; use a larger one, or fewer epochs."
            )
        cycles = {"t_initial": length, "cycle_mul": factor, "cycle_decay": schedule.cycle_decay}
        return arguments | cycles | {"cycle_limit": math.inf}  # `step_update` ends them

    def _at_plateau(self, t: int, warmup: int, base: float) -> float:
        start = self.schedule.warmup_lr
        return start + t * (base - start) / warmup if t < warmup else self.plateau.rate(base)

    def _one_cycle(self, t: int, first: float, middle: float, last: float) -> float:
        """What goes from `first` to `middle` in the warm-up, and then to `last`, both as a cosine, as torch's
        OneCycleLR does (L. Smith 2018, arxiv.org/abs/1803.09820)."""
        peak = max(self.warmup - 1, 0)
        start, end, share = first, middle, t / max(peak, 1)
        if t >= peak:
            start, end, share = middle, last, min((t - peak) / max(self.end - 1 - peak, 1), 1.0)
        return end + (start - end) / 2 * (1 + math.cos(math.pi * share))

    def step_update(self, update: int) -> None:
        """Set the learning rate of update number `update`, counted from 0, and the momentum, if it moves."""
        schedule, warmup, self.update = self.schedule, self.warmup, update
        t = update // self.interval * self.interval
        if schedule.warmup_method == "constant" and t < warmup:
            t = 0
        cycles_ended = self.ends_cycles and t >= self.end
        rates = [schedule.min_lr for _ in self.base_values] if cycles_ended else self._rates(t)
        groups = zip(self.optimizer.param_groups, self.base_values, rates, self.momenta, strict=True)
        for group, base, rate, momentum in groups:
            scale = group.get("lr_scale", 1.0)
            group["lr"] = rate * scale
            start = schedule.warmup_bias_lr if group.get(BIASES) else None
            if self.scales and update < warmup:
                # As ultralytics' engine/trainer.py:
                # np.interp(ni, [0, nw], [warmup_bias_lr or 0, initial_lr * lf(epoch)])
                first = (schedule.warmup_lr if start is None else start) * scale
                group["lr"] = first + (group["lr"] - first) * (update / warmup)
            elif start is not None and not self.scales and t < warmup:
                group["lr"] = (start + (base - start) * t / warmup) * scale
            if self.moves and momentum is not None:
                set_momentum(group, self._momentum_at(update, momentum))

    def _momentum_at(self, update: int, end: float) -> float:
        middle, start = self.schedule.cycle_momentum, self.schedule.warmup_momentum
        if self.schedule.name == "one_cycle" and middle is not None:
            return self._one_cycle(update, end, middle, end)
        return end if start is None or update >= self.warmup else start + (end - start) * update / self.warmup

    def step(self, epoch: int, metric: float) -> None:
        """Record the figure `metric` after `epoch` epochs, higher if better; the next update's rate follows from it."""
        self.plateau.step(epoch, metric)
        self.step_update(self.update)

    def state_dict(self) -> dict[str, Any]:
        return self.plateau.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.plateau.load_state_dict(state_dict)


def check_schedule(schedule: Schedule, splits: Splits) -> None:
    """Raise UserError if the schedule needs a validation split and the data has none."""
    if schedule.name == "plateau" and splits.validation is None:
        raise UserError(
            "--schedule.name plateau: the learning rate follows the validation split, but this data has no "
            "validation split: set one aside with --data.val-fraction 0.1, or choose another schedule."
        )
