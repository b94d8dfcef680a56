"""Where the time of a run went: its starts, and what was done twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_train.records.cost import FILE, Start, cost_of, cost_text, duration, read_starts


def start(began: float, ended: float, first: int, last: int, **seconds: Any) -> Start:
    return Start(began, ended, 2, 0, first, last, **seconds)


def test_what_came_after_the_checkpoint_was_done_twice() -> None:
    killed = start(0, 100, 10, 30, starting=5, training=70, evaluating=6, saving=1)
    killed.go_back(25)
    assert (killed.training, killed.evaluating, killed.repeated, killed.last_update) == (52.5, 4.5, 19, 25)
    killed.go_back(25)  # nothing is lost twice
    assert killed.repeated == 19
    killed.go_back(0)  # all checkpoints were damaged
    assert (killed.training, killed.evaluating, killed.repeated, killed.last_update) == (0, 0, 76, 10)


@given(st.integers(0, 900), st.floats(0, 500), st.floats(0, 50), st.lists(st.integers(0, 900)))
def test_no_time_is_lost_or_invented(updates: int, training: float, evaluating: float, back: list[int]) -> None:
    entry = start(0, 1, 0, updates, training=training, evaluating=evaluating)
    for each in back:
        entry.go_back(each)
        total = entry.training + entry.evaluating + entry.repeated
        assert total == pytest.approx(training + evaluating)
        assert min(entry.training, entry.evaluating, entry.repeated) >= 0


def test_the_parts_add_up_to_the_wall_time() -> None:
    first = start(1000, 1060, 0, 30, starting=10, training=30, evaluating=4, saving=1, repeated=15)
    second = start(1160, 1200, 20, 60, starting=10, training=28, evaluating=2, finished=True)
    longer = start(9000, 9050, 60, 90, starting=10, training=40)  # a finished run that goes on: nobody waited for it
    cost = cost_of([first, second, longer])
    assert (cost["wall_seconds"], cost["between_seconds"], cost["starts"]) == (250, 100, 3)
    names = ("starting", "training", "evaluating", "saving", "repeated", "between")
    assert sum(cost[f"{name}_seconds"] for name in names) == 250
    assert cost["accelerator_hours"] is None
    text = cost_text(cost)
    assert text.startswith("4 min 10 s in 3 starts: 39% training, 2% evaluating,") and "6% done twice" in text


def test_accelerators_are_counted_by_the_hour() -> None:
    cost = cost_of([Start(0, 3600, 4, 4, 0, 10), Start(3600, 5400, 4, 4, 10, 20)])
    assert cost["accelerator_hours"] == 6


def test_damaged_starts_are_left_out(tmp_path: Path) -> None:
    assert read_starts(tmp_path) == [] and cost_of([]) == {}
    good = {"began": 0, "ended": 1, "processes": 1, "accelerators": 0, "first_update": 0, "last_update": 2}
    bad = [{}, good | {"training": "long"}, good | {"new": 1}, 7]
    (tmp_path / FILE).write_text(json.dumps({"starts": [good, *bad, good | {"ended": -1}]}))
    assert len(read_starts(tmp_path)) == 1
    (tmp_path / FILE).write_text('{"starts": 3}')
    assert read_starts(tmp_path) == []


def test_durations_in_words() -> None:
    assert [duration(seconds) for seconds in (4.21, 190, 7500)] == ["4.2 s", "3 min 10 s", "2 h 05 min"]
