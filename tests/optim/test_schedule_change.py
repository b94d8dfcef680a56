"""The line about the learning rate of a run whose settings have changed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch

from accel_train.config.declaration import FALLING
from accel_train.config.schema import Config, Optim, Schedule
from accel_train.data.order.plan import Plan
from accel_train.optim.schedule import LearningRate, schedule_change

UPDATES = 10  # of an epoch


def rate_at(update: int, schedule: Schedule, epochs: int, lr: float = 0.1) -> float:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    LearningRate(schedule, optimizer, updates=epochs * UPDATES, updates_per_epoch=UPDATES).step_update(update)
    return float(optimizer.param_groups[0]["lr"])


def line(schedule: Schedule, changed: list[str], *, lr: float, epochs: float, updates: int, **rates: Any) -> str:
    config = Config(schedule=schedule, optim=Optim(lr=lr), epochs=epochs)
    plan = Plan(UPDATES, batch_size=1, processes=1, accumulation=1, updates=updates)
    return schedule_change(config, plan, changed, **rates)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (
            Schedule("cosine"),
            "goes from 0 back up to 0.05, because cosine now ends at epoch 20; then it falls to 6.17e-06",
        ),
        (
            Schedule("cosine", min_lr=0.001, warmup_epochs=2),
            "goes from 0.001 back up to 0.0591, because cosine now ends at epoch 20; then it falls to 0.00101",
        ),
        (
            Schedule("poly"),
            "goes from 0 back up to 0.05, because poly now ends at epoch 20; then it falls to 0.0005",
        ),
        (
            Schedule("constant"),
            "stays at 0.1, because constant does not depend on the number of epochs",
        ),
        (
            Schedule("step", step_epochs=10),  # it falls right here, with both numbers of epochs
            "stays at 0.01, because step does not depend on the number of epochs",
        ),
        (
            Schedule("multistep", milestones=(5, 15)),
            "stays at 0.01, because multistep does not depend on the number of epochs; then it falls to 0.001",
        ),
        (
            Schedule("plateau"),
            "stays at 0.1, because plateau does not depend on the number of epochs; it falls when the "
            "validation split does not get better",
        ),
    ],
)
def test_twice_as_many_epochs(schedule: Schedule, expected: str) -> None:
    before, rate = (rate_at(10 * UPDATES, schedule, epochs) for epochs in (10, 20))
    told = line(
        schedule,
        ["epochs", "log-every-updates"],
        before=before,
        rate=rate,
        lr=0.1,
        epochs=20,
        updates=200,
    )
    assert told == f"the learning rate {expected}"


@pytest.mark.parametrize(
    ("schedule", "changed", "expected"),
    [
        (Schedule("constant"), ["schedule.name", "epochs"], "up to 0.1, because the schedule is now constant"),
        (Schedule("constant"), ["optim.lr"], "up to 0.1, because optim.lr has changed"),
        (
            Schedule("cosine", min_lr=0.02),
            ["epochs", "optim.lr", "schedule.min-lr"],
            "up to 0.06, because optim.lr has changed and schedule.min-lr has changed and cosine now ends at epoch 20; "
            "then it falls to 0.02",
        ),
    ],
)
def test_other_changes(schedule: Schedule, changed: list[str], expected: str) -> None:
    rate = rate_at(10 * UPDATES, schedule, 20)
    told = line(schedule, changed, before=0.001, rate=rate, lr=0.1, epochs=20, updates=200)
    assert told.removeprefix("the learning rate goes from 0.001 ").removeprefix("back ") == expected
    down = line(schedule, changed, before=1.0, rate=rate, lr=0.1, epochs=20, updates=200)
    assert down.startswith("the learning rate goes from 1 down to ")


def test_other_options_do_not_concern_it() -> None:
    for changed in ([], ["optim.weight-decay"], ["data.root", "ema.decay"]):
        assert not line(Schedule("cosine"), changed, before=0.1, rate=0.2, lr=0.2, epochs=2, updates=20)


def test_each_schedule_that_falls_to_the_end_says_where_it_ends() -> None:
    for name in FALLING:
        told = line(Schedule(name), ["epochs"], before=0.0, rate=0.05, lr=0.1, epochs=2, updates=20)
        assert f"{name} now ends at epoch 2" in told


@pytest.mark.slow
def test_a_run_that_goes_on_says_it(tmp_path: Path) -> None:
    """Its numbers are those of the log: the next update has the learning rate that the line names."""
    run = tmp_path / "run"

    def train(*words: object) -> tuple[str, list[float]]:
        done = helpers.run("digits", "--output-dir", run, "--log-every-updates", 1, *words)
        assert done.returncode == 0, done.stderr
        said = [line for line in done.stderr.splitlines() if "the learning rate " in line]
        rates = [float(line.partition(" lr ")[2].split()[0]) for line in done.stdout.splitlines() if " lr " in line]
        return said[0] if said else "", rates

    assert train("--epochs", 1)[0] == ""
    longer = ["--epochs", 2, "--allow-change", "epochs"]
    said, rates = train(*longer)
    assert f"goes from 0 back up to {rates[0]:.3g}, because cosine now ends at epoch 2" in said
    assert said.endswith(f"then it falls to {rates[-1]:.3g}")
    assert train(*longer)[0] == ""  # nothing is left to do
    said, rates = train("--epochs", 3, "--optim.lr", 0.02, "--allow-change", "epochs", "optim.lr")
    assert f"goes from 0 up to {rates[0]:.3g}, because optim.lr has changed and cosine now ends at epoch 3" in said
    assert all(later < earlier for earlier, later in itertools.pairwise(rates)) and rates[0] < 0.02


def test_the_end_may_be_that_of_stop_updates() -> None:
    """What falls until the end of the run falls until --stop.updates, too; other schedules do not know of it."""
    values: Any = {"before": 0.01, "rate": 0.05, "lr": 0.1, "epochs": 20}
    told = line(Schedule("cosine"), ["stop.updates"], updates=150, **values)
    assert told.startswith("the learning rate goes from 0.01 back up to 0.05, because cosine now ends at update 150;")
    told = line(Schedule("poly"), ["stop.updates", "epochs"], updates=200, **values)
    assert "because poly now ends at epoch 20" in told
    assert line(Schedule("step"), ["stop.updates"], updates=150, **values) == ""
