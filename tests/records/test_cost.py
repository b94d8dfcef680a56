"""Where the time of a run went: its starts, and what was done twice."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import helpers
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_train.launch.environment import Launch
from accel_train.records.cost import FILE, Ledger, Start, cost_of, cost_text, duration, read_starts
from accel_train.records.directory import RunDirectory


def start(began: float, ended: float, first: int, last: int, **seconds: Any) -> Start:
    return Start(began, ended, 2, 0, first, last, **seconds)


def test_what_came_after_the_checkpoint_was_done_twice() -> None:
    saves = [(10, 20.0, 2.0, 1.0), (20, 40.0, 4.0, 2.0)]
    killed = start(0, 100, 0, 30, starting=5, training=70, evaluating=6, saving=1, waiting=9, saves=saves)
    killed.go_back(20)
    assert (killed.training, killed.evaluating, killed.repeated, killed.waiting) == (40, 4, 32, 2)
    killed.go_back(20)  # nothing is lost twice
    assert killed.repeated == 32
    killed.go_back(15)  # that checkpoint was damaged, and a later start had to take an older one
    assert (killed.training, killed.evaluating, killed.repeated) == (20, 2, 54)
    killed.go_back(0)
    assert (killed.training, killed.evaluating, killed.repeated) == (0, 0, 76)


@given(
    st.lists(st.tuples(st.integers(1, 100), st.floats(0, 50), st.floats(0, 5)), max_size=8),
    st.lists(st.integers(0, 900)),
)
def test_no_time_is_lost_or_invented(steps: list[tuple[int, float, float]], back: list[int]) -> None:
    update, training, evaluating, saves = 0, 0.0, 0.0, []
    for more, trained, evaluated in steps:
        update, training, evaluating = update + more, training + trained, evaluating + evaluated
        saves.append((update, training, evaluating, 0.0))
    entry = start(0, 1, 0, update, training=training + 3, evaluating=evaluating, saves=saves)
    for each in back:
        entry.go_back(each)
        total = entry.training + entry.evaluating + entry.repeated
        assert total == pytest.approx(training + evaluating + 3)
        assert min(entry.training, entry.evaluating, entry.repeated) >= 0


def test_the_parts_add_up_to_the_wall_time() -> None:
    first = start(1000, 1060, 0, 30, starting=10, training=30, evaluating=4, saving=1, repeated=15, waiting=3)
    second = start(1160, 1200, 20, 60, starting=10, training=28, evaluating=2, finished=True)
    longer = start(9000, 9050, 60, 90, starting=10, training=40)  # a finished run that goes on: nobody waited for it
    cost = cost_of([first, second, longer])
    assert (cost["wall_seconds"], cost["between_seconds"], cost["starts"]) == (250, 100, 3)
    names = ("starting", "training", "evaluating", "saving", "repeated", "between")
    assert sum(cost[f"{name}_seconds"] for name in names) == 250
    assert cost["ettr"] == pytest.approx((98 + 6) / 250)
    assert cost["accelerator_hours"] is None
    text = cost_text(cost)
    assert text.startswith("4 min 10 s in 3 starts: 39% training, 2% evaluating,") and "6% done twice" in text


def test_a_run_that_began_elsewhere_says_so() -> None:
    assert cost_of([]) == {}
    cost = cost_of([start(0, 10, 50, 60, training=5)])
    assert not cost["complete"]


def test_accelerators_are_counted_by_the_hour() -> None:
    cost = cost_of([Start(0, 3600, 4, 4, 0, 10), Start(3600, 5400, 4, 4, 10, 20)])
    assert cost["accelerator_hours"] == 6


def test_damaged_starts_are_left_out(tmp_path: Path) -> None:
    assert read_starts(tmp_path) == []
    good = {"began": 0, "ended": 1, "processes": 1, "accelerators": 0, "first_update": 0, "last_update": 2}
    bad = [{}, good | {"training": "long"}, good | {"saves": [[1]]}, good | {"new": 1}, 7]
    (tmp_path / FILE).write_text(json.dumps({"starts": [good, *bad, good | {"ended": -1}]}))
    assert len(read_starts(tmp_path)) == 1
    (tmp_path / FILE).write_text('{"starts": 3}')
    assert read_starts(tmp_path) == []


def test_a_start_that_begins_anew_forgets_the_others(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, writes=True)
    Ledger(directory, launch=Launch(), on_cpu=True, update=0)
    assert len(Ledger(directory, launch=Launch(), on_cpu=True, update=0).starts) == 2  # killed before its first save
    assert len(Ledger(directory, launch=Launch(), on_cpu=True, update=0, anew=True).starts) == 1


def test_durations_in_words() -> None:
    assert [duration(seconds) for seconds in (4.21, 190, 7500)] == ["4.2 s", "3 min 10 s", "2 h 05 min"]


SLOW_NET = """
import time
from torch import nn

class Slow(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layer = nn.Linear(64, num_classes)

    def forward(self, x):
        time.sleep(0.02)
        return self.layer(x.flatten(1))

def net(num_classes, in_chans, image_size):
    return Slow(num_classes)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_three_times(tmp_path: Path) -> None:
    """An update takes 20 ms and a bit; killed each time two to four seconds after a save, and started three later."""
    (tmp_path / "mine.py").write_text(SLOW_NET)
    words = ["digits", "--model.name", f"{tmp_path / 'mine.py'}:net", "--epochs", "36", "--eval-every-epochs", "36"]
    words += [
        "--checkpoint.every-updates",
        "300",
        "--checkpoint.every-epochs",
        "36",
        "--output-dir",
        str(tmp_path / "run"),
    ]
    helpers.python("-c", "")  # the server that forks the programs has imported torch now
    run, gaps, lost, began = tmp_path / "run", 0.0, 0, time.time()

    def update() -> int:
        lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
        return max([json.loads(line).get("update", 0) for line in lines if line.endswith("}")], default=0)

    for kill in (500, 740, 1000):
        with helpers.started(run, *words) as training:
            training.until(lambda kill=kill: update() >= kill)  # type: ignore[misc]
            training.popen.kill()
            training.popen.wait()
        lost += update() - kill // 300 * 300
        killed = time.time()
        time.sleep(3)
        gaps += time.time() - killed
    done = helpers.run(*words, "--output-dir", run)
    wall = time.time() - began
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((run / "result.json").read_text())
    cost, an_update = result["cost"], result["train_seconds"] / result["updates"]
    assert (cost["starts"], cost["complete"]) == (4, True)
    assert cost["wall_seconds"] == pytest.approx(wall, abs=3)
    # What a killed start did in its last two seconds nobody has written down: it counts as time between starts.
    assert 0 <= cost["between_seconds"] - gaps < 3 * 3.5
    assert -3 * 2.5 < cost["repeated_seconds"] - lost * an_update < 1
    assert cost["training_seconds"] == pytest.approx(result["train_seconds"], rel=0.1)
    names = ("starting", "training", "evaluating", "saving", "repeated", "between")
    assert sum(cost[f"{name}_seconds"] for name in names) == pytest.approx(cost["wall_seconds"], abs=1)
    assert "in 4 starts" in done.stdout
