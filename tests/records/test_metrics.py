"""records/metrics.py: all outputs follow the one table of metrics, that of the task."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from accel_train import cli
from accel_train.checkpoint.state import TrainState
from accel_train.records.metrics import Evaluation
from accel_train.task import (
    ONE_LABEL,
    SEVERAL_LABELS,
    MeanMetric,
    headlines,
    same,
    top_k,
)


def probability(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.softmax(1).gather(1, labels[:, None])[:, 0]


ADDED = [
    MeanMetric("probability", ".3f", predict=same, score=probability, training_predict=same),
    top_k("top4_accuracy", 4),
]


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ONE_LABEL.metrics.extend(ADDED)
    yield
    del ONE_LABEL.metrics[-len(ADDED) :]
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.usefixtures("added")
def test_a_metric_that_is_added_to_the_table_is_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    words = ["--epochs", "2", "--ema.enabled", "true", "--trackers", "tensorboard", "--output-dir", str(run)]
    assert cli.main(["train", "digits", *words]) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((run / "result.json").read_text())
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    curves = set(events.Tags()["scalars"])

    trained = [line for line in lines if line["kind"] == "train"]
    assert trained and all(0 < line["probability"] < 1 and "top4_accuracy" not in line for line in trained)
    evaluated = {(line["split"], line["weights"]): line for line in lines if line["kind"] == "eval"}  # the last of each
    epoch, test, ema = evaluated["train", "model"], evaluated["test", "model"], evaluated["test", "ema"]
    assert 0 < epoch["probability"] < 1 and "top4_accuracy" not in epoch
    for line in (test, ema):
        assert line["accuracy"] <= line["top4_accuracy"] <= line["top5_accuracy"]
        assert 0 < line["probability"] <= 1
    # Also those that the console does not show: a report would set the model's beside the others of the EMA.
    for name in ("probability", "top4_accuracy", "top5_accuracy", "f1"):
        assert result[f"test_{name}"] == test[name]
        assert result[f"ema_test_{name}"] == ema[name]
    for name in ("probability", "top4_accuracy"):
        assert {f"test/{name}", f"test_ema/{name}"} <= curves
    assert "train/probability" in curves and "train/top4_accuracy" not in curves

    shown = f"probability {test['probability']:.3f}  top4_accuracy {test['top4_accuracy']:.2%}"
    words = [" ".join(line.split()) for line in printed]  # the figures are aligned
    assert any(" test loss" in line and " ".join(shown.split()) in line for line in words)
    assert any(" update " in line and "probability 0." in line for line in printed)
    assert json.loads((run / "status.json").read_text())["probability"] == trained[-1]["probability"]

    assert cli.main(["evaluate", str(run)]) == 0
    out = capsys.readouterr().out
    assert "probability" in out and "top-4 accuracy" in out
    again = json.loads((run / "evaluation-test.json").read_text())
    assert again["model"]["top4_accuracy"] == test["top4_accuracy"]


def test_an_epochs_metrics_go_through_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "update-00000002"
    state = TrainState(update=2, epoch_samples=8)
    state.add_metrics({"loss": 2.5, "accuracy": 3, "margin": 1.5}, 5)
    saved = json.loads(json.dumps(state.to_saved()))
    assert saved["epoch_sums"] == {"margin": 1.5} and saved["epoch_correct"] == 3
    resumed = TrainState.from_saved(saved, path)
    resumed.add_metrics({"loss": 0.5, "accuracy": 1, "margin": 0.5}, 3)
    assert resumed.epoch_metrics == {"loss": 3 / 8, "accuracy": 4 / 8, "margin": 2 / 8}
    resumed.begin_epoch(1)
    assert resumed.epoch_sums == resumed.to_saved()["epoch_sums"] == {}


def test_a_metric_that_is_new_within_an_epoch_waits_for_the_next() -> None:
    older = TrainState(update=1, epoch_loss_sum=1.0, epoch_correct=1, epoch_count=4, epoch_samples=4)
    state = TrainState.from_saved(older.to_saved(), Path("update-00000001"))
    state.add_metrics({"loss": 1.0, "accuracy": 1, "margin": 9.0}, 4)
    assert state.epoch_metrics == {"loss": 2 / 8, "accuracy": 2 / 8}
    state.begin_epoch(1)
    state.add_metrics({"loss": 1.0, "accuracy": 1, "margin": 9.0}, 4)
    assert state.epoch_metrics["margin"] == 9.0 / 4


def test_the_console_shows_headlines_only() -> None:
    figures = {"loss": 0.25, "accuracy": 0.5, "top5_accuracy": 0.75}
    assert headlines(figures, ONE_LABEL.metrics) == {"loss": "0.2500", "accuracy": "50.00%"}
    figures = {"loss": 0.25, "map": 0.5, "f1": 0.125}
    assert headlines(figures, SEVERAL_LABELS.metrics) == {"loss": "0.2500", "map": "50.00%", "f1": "12.50%"}


def test_an_evaluation_with_a_loss_that_is_not_finite_decides_nothing() -> None:
    for loss in (math.nan, math.inf):
        assert math.isnan(Evaluation({"loss": loss, "accuracy": 0.9}, 10, {}, []).value_to_choose_by("accuracy"))
    assert Evaluation({"loss": 0.5, "accuracy": 0.9}, 10, {}, []).value_to_choose_by("accuracy") == 0.9
