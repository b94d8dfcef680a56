"""What the last screen of a run says of its best metric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel_train.checkpoint.train_state import TrainState
from accel_train.records.summary import final_figures

RESULT: dict[str, Any] = {"best_metric": "accuracy", "cost": {}}


@pytest.fixture(autouse=True)
def without_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_train.records.summary.cost_text", lambda cost: "")


@pytest.mark.parametrize(("best_update", "use"), [(120, "the last weights"), (90, "to use it, add --checkpoint best")])
def test_the_best_metric_is_told_with_the_way_to_its_weights(best_update: int, use: str) -> None:
    state = TrainState(epoch=4, update=120, best_figure=0.875, best_epoch=3, best_update=best_update)
    shown = final_figures(RESULT, state, {}, None, Path("run"))
    assert shown["best val accuracy"] == f"87.50% after epoch 3; {use}"


def test_without_a_validation_split_there_is_no_best_metric() -> None:
    shown = final_figures(RESULT, TrainState(epoch=4, update=120), {}, None, Path("run"))
    assert not [name for name in shown if name.startswith("best")]
