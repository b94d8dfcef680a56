"""The position of a run: which figure is the best, when the run ends, and what an epoch has counted."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from accel_train.checkpoint.state import TrainState
from accel_train.config.schema import Config, Stop
from accel_train.data.order import Plan, create_plan


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("first", [math.nan, math.inf, -math.inf])
def test_a_first_figure_that_is_not_finite_is_not_the_best(first: float, lower: bool) -> None:
    state = TrainState(update=10)
    assert not state.record_best(first, 1, lower=lower)
    assert (state.best_value, state.best_update, state.best_epoch) == (None, None, 1)  # the patience begins here
    state.update = 20
    assert state.record_best(0.5, 2, lower=lower)
    assert (state.best_value, state.best_update, state.best_epoch) == (0.5, 20, 2)
    assert not state.record_best(first, 3, lower=lower) and state.best_value == 0.5


def test_the_highest_or_the_lowest_is_the_best_and_an_equal_one_is_not_better() -> None:
    for lower, figures in ((False, [0.5, 0.4, 0.5, 0.6]), (True, [0.5, 0.6, 0.5, 0.4])):
        state = TrainState()
        assert [state.record_best(figure, 1, lower=lower) for figure in figures] == [True, False, False, True]


def test_the_end_follows_from_the_state(tmp_path: Path) -> None:
    config = Config(epochs=20, eval_every_epochs=2, stop=Stop(patience_epochs=3, hours=1.0))
    plan = create_plan(config, 100, processes=1, accumulation=1, virtual_batch=1)
    state = TrainState(epoch=2, update=20)
    assert state.record_best(0.5, 2, lower=True) and not state.record_best(float("nan"), 2, lower=True)
    assert not state.record_best(0.5, 4, lower=True) and state.best_epoch == 2
    ends = [TrainState(epoch=epoch, update=epoch, best_epoch=2).stopped_by(config, plan) for epoch in (4, 5, 6, 20)]
    assert ends == [None, None, "patience", "epochs"]  # after 5 epochs nothing was evaluated
    every = Config(epochs=20, stop=Stop(patience_epochs=3))
    assert [TrainState(epoch=epoch, update=epoch, best_epoch=2).stopped_by(every, plan) for epoch in (4, 5)] == [
        None,
        "patience",
    ]
    assert (
        TrainState(epoch=5, epoch_samples=3, wall_seconds=1e6).stopped_by(config, plan) is None
    )  # in the middle of one
    assert TrainState(epoch=5, wall_seconds=3600.0).stopped_by(config, plan) == "hours"

    # Nothing was finite yet: the patience begins here.
    state = TrainState(epoch=3, update=30)
    assert not state.record_best(math.nan, 4, lower=False) and state.best_epoch == 4
    path = tmp_path / "update-00000030"
    assert TrainState.from_saved(state.to_saved(), path) == state


@pytest.mark.parametrize(
    ("count", "left_out", "position", "drop_last", "right"),
    [
        (100, 0, 100, False, True),
        (90, 0, 90, True, True),
        (70, 30, 100, False, True),
        (60, 30, 90, True, True),
        (0, 0, 0, False, False),
        (90, 0, 90, False, False),
        (60, 0, 60, True, False),
        (100, 0, 90, True, False),
        (70, 0, 100, False, False),
        (130, 0, 130, False, False),
    ],
)
def test_an_epoch_is_all_of_the_data(count: int, left_out: int, position: int, drop_last: bool, right: bool) -> None:
    state = TrainState(epoch_count=count, epoch_left_out=left_out, epoch_samples=position)
    plan = Plan(100, 30, 1, 1, drop_last)
    if right:
        state.check_epoch(plan)
    else:
        with pytest.raises(RuntimeError, match="but the training data has 100"):
            state.check_epoch(plan)
