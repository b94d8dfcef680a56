"""What whole runs learn, and what they say of it: the training script, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState, GradientState

from accel_train.cli import main


@pytest.fixture(autouse=True)
def fresh_accelerate(monkeypatch: pytest.MonkeyPatch):
    """Accelerate's state is one for the whole process; each program starts without any."""
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "1" if name.endswith("THREADS") else "PASSIVE")
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def trained(run: Path, words: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of `accel-train train WORDS`."""
    assert main(["train", *words.split(), "--output-dir", str(run)]) == 0
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_plateau_counts_epochs_where_not_every_one_is_evaluated(tmp_path: Path) -> None:
    # A rate too small to move any prediction: 2 epochs after the first evaluation, more than 1, it decays.
    lines = trained(
        tmp_path,
        "digits --epochs 6 --data.train-limit 96 --data.val-fraction 0.1 --eval-every-epochs 2 --log-every-updates 1 "
        "--schedule.name plateau --schedule.patience-epochs 1 --optim.lr 1e-9",
    )
    rates = {line["epoch"]: line["lr"] for line in lines if line["kind"] == "train"}
    assert rates == pytest.approx({**dict.fromkeys([1, 2, 3, 4], 1e-9), **dict.fromkeys([5, 6], 1e-10)})
