"""What a run's learning rate does after its settings have changed, in one line for the user."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from accel_train.config.declaration import FALLING
from accel_train.config.schema import Config, Schedule
from accel_train.data.order.plan import Plan
from accel_train.optim.schedule import LearningRate


def schedule_change(config: Config, plan: Plan, changed: Iterable[str], *, before: float, rate: float) -> str:
    """Say how the learning rate goes on: the line is "" if none of the `changed` options concerns it.

    `before`: the rate that the next update would have had. `rate`: the rate that it has.
    """
    schedule, lr, updates = config.schedule, config.optim.lr, plan.updates
    ends = ("epochs", "stop.updates") if _ends_with_run(schedule) else ("epochs",)
    keys = [key for key in changed if key in (*ends, "optim.lr") or key.startswith("schedule.")]
    if not keys:
        return ""
    up = "back up" if "optim.lr" not in keys and before < rate <= lr else "up"
    same = abs(rate - before) <= 1e-3 * max(rate, before)
    move = "stays at" if same else f"goes from {before:.3g} {up if rate > before else 'down'} to"
    in_epochs = updates == max(1, round(config.epochs * plan.updates_per_epoch))
    end = f"epoch {config.epochs:g}" if in_epochs else f"update {updates:,}"
    text = f"the learning rate {move} {rate:.3g}, because {_reason(schedule, keys, end)}"
    if schedule.name == "plateau":
        return f"{text}; it falls when the validation split does not get better"
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)  # some change it, too
    made = LearningRate(schedule, optimizer, updates=updates, updates_per_epoch=plan.updates_per_epoch)
    made.step_update(updates - 1)
    last = float(optimizer.param_groups[0]["lr"])
    return f"{text}; then it falls to {last:.3g}" if last < rate * 0.999 else text


def _ends_with_run(schedule: Schedule) -> bool:
    return schedule.name in FALLING and not (schedule.restarts and schedule.cooldown_epochs == 0)


def _reason(schedule: Schedule, keys: list[str], end: str) -> str:
    reasons = [f"the schedule is now {schedule.name}"] if "schedule.name" in keys else []
    reasons += [f"{key} has changed" for key in keys if key not in ("epochs", "stop.updates", "schedule.name")]
    if ("epochs" in keys or "stop.updates" in keys) and _ends_with_run(schedule):
        reasons.append(f"{schedule.name} now ends at {end}")
    return " and ".join(reasons) or f"{schedule.name} does not depend on the number of epochs"
