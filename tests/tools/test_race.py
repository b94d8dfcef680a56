"""What benchmarks/race.py reads from its programs, and that a program's time is that of its turns."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import helpers
import pytest

sys.path.insert(0, str(helpers.ROOT / "benchmarks"))
import race

LOG = """
{"update": 10, "images_per_second": 652.3}
Epoch 0/-2 \x1b[35m━━━\x1b[0m 20/20 0:00:01 {"epoch": 1, "accuracy": 0.97}
{"epoch": 2, "accura"""

METRICS = [
    {"kind": "train", "epoch": 1, "update": 10, "accuracy": 0.99},
    {"kind": "eval", "split": "train", "epoch": 1, "accuracy": 0.992},
    {"kind": "eval", "split": "val", "epoch": 1, "accuracy": 0.991},
    {"kind": "eval", "split": "test", "weights": "model", "epoch": 1, "accuracy": 0.98},
    {"kind": "save", "epoch": 1},
]

PROGRAM = """
import json, sys, time
for epoch in range(1, 4):
    end = time.process_time() + 0.3
    while time.process_time() < end:  # work, not sleep: a stopped program does none
        pass
    print(json.dumps({"epoch": epoch, "accuracy": epoch / 10}), flush=True)
if sys.argv[1] == "on":
    time.sleep(60)
"""


def test_only_accuracies_on_the_test_images_count(tmp_path: Path) -> None:
    assert race.tested(tmp_path / "nothing yet") == []
    (tmp_path / "log").write_text(LOG)
    assert race.tested(tmp_path / "log") == [(1, 0.97)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in METRICS))
    assert race.tested(tmp_path / "metrics.jsonl") == [(1, 0.98)]


def racers(tmp_path: Path, then: str) -> dict[str, race.Start]:
    (tmp_path / "program.py").write_text(PROGRAM)

    def start(folder: Path, seed: int, images: int | None) -> race.Racer:
        return race.Racer([tmp_path / "program.py", then], folder / "log", folder / "log")

    return {"a": start, "b": start}


@pytest.mark.slow
@pytest.mark.parametrize("then", ["on", "end"])
def test_a_program_s_time_is_that_of_its_turns(
    tmp_path: Path, then: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if it ends by itself with the test that reaches the goal."""
    monkeypatch.setattr(race, "TURN_SECONDS", 0.2)
    begun = time.monotonic()
    found = race.race(racers(tmp_path, then), seed=0, goal=0.3, images=None)
    elapsed = time.monotonic() - begun
    for tests in found.values():
        assert [(test.epoch, test.accuracy) for test in tests] == [(1, 0.1), (2, 0.2), (3, 0.3)]
        seconds = [test.seconds for test in tests]
        assert seconds == sorted(seconds) and seconds[-1] >= 0.9
    assert sum(tests[-1].seconds for tests in found.values()) <= elapsed, "each has only its own turns"
    assert capsys.readouterr().out.count("30.00% in epoch 3") == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_programs_run_and_are_ended_by_their_first_test() -> None:
    line = [sys.executable, str(helpers.ROOT / "benchmarks" / "race.py"), "--quick"]
    done = subprocess.run(line, env=helpers.environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    for name in ("accel_train", "mnist_fast", "tutorial", "timm"):
        assert f"seed 0: {name} " in done.stdout, done.stdout
