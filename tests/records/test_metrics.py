"""records/metrics.py: all outputs follow its one table of metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from accel_train import cli
from accel_train.checkpoint.train_state import TrainState
from accel_train.records.metrics import (
    METRICS,
    Evaluation,
    MeanMetric,
    average_precision_of_classes,
    f1_of_classes,
    headlines,
    highest,
    macro_f1,
    mean_average_precision,
    micro_average_precision,
    micro_f1,
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
    METRICS.extend(ADDED)
    yield
    del METRICS[-len(ADDED) :]
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
    for name in ("probability", "top4_accuracy"):
        assert result[f"test_{name}"] == test[name]
        assert result[f"ema_test_{name}"] == ema[name]
        assert {f"test/{name}", f"test_ema/{name}"} <= curves
    assert "train/probability" in curves and "train/top4_accuracy" not in curves

    shown = f"probability {test['probability']:.3f}  top4_accuracy {test['top4_accuracy']:.2%}"
    words = [" ".join(line.split()) for line in printed]  # the figures are aligned
    assert any(" test loss" in line and " ".join(shown.split()) in line for line in words)
    assert any(" update " in line and "probability 0." in line for line in printed)
    assert json.loads((run / "status.json").read_text())["probability"] == trained[-1]["probability"]

    assert cli.main(["evaluate", str(run)]) == 0
    out = capsys.readouterr().out
    assert "probability" in out and "top4_accuracy" in out
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
    assert headlines(figures) == {"loss": "0.2500", "accuracy": "50.00%"}
    figures = {"loss": 0.25, "map": 0.5, "micro_map": 0.75, "f1": 0.125, "micro_f1": 0.25}
    assert headlines(figures) == {"loss": "0.2500", "map": "50.00%", "f1": "12.50%"}


def test_of_equal_logits_the_first_class_is_the_predicted_one() -> None:
    """As argmax and NumPy take it; topk may take any."""
    logits = torch.randint(3, (500, 12), generator=torch.Generator().manual_seed(0)).float()  # many are equal
    expected = torch.from_numpy(logits.numpy().argmax(1))
    for k in (1, 2, 5, 12):
        best = highest(logits, k)
        assert torch.equal(best[:, 0], expected)
        assert torch.equal(logits.gather(1, best).sort(1).values, logits.topk(k).values.sort(1).values)
        assert all(len(set(row)) == k for row in best.tolist())  # no class twice


def test_top_5_accuracy_counts_five_classes() -> None:
    logits, (top5,) = torch.arange(10.0).repeat(10, 1), [each for each in METRICS if each.name == "top5_accuracy"]
    assert isinstance(top5, MeanMetric)
    assert top5.score(top5.predict(logits), torch.arange(10)).tolist() == [False] * 5 + [True] * 5


def test_an_evaluation_with_a_loss_that_is_not_finite_decides_nothing() -> None:
    for loss in (math.nan, math.inf):
        assert math.isnan(Evaluation({"loss": loss, "accuracy": 0.9}, 10, {}, []).deciding("accuracy"))
    assert Evaluation({"loss": 0.5, "accuracy": 0.9}, 10, {}, []).deciding("accuracy") == 0.9


SIZES = st.tuples(st.integers(1, 30), st.integers(2, 6), st.integers(0, 2**32 - 1))


@given(SIZES)
def test_the_f1_of_one_label_an_image_is_that_of_scikit_learn(sizes: tuple[int, int, int]) -> None:
    samples, classes, seed = sizes
    labels, predicted = torch.randint(classes, (2, samples), generator=torch.Generator().manual_seed(seed))
    assert macro_f1(predicted, labels) == pytest.approx(f1_score(labels, predicted, average="macro"), abs=1e-12)


@pytest.mark.ci
@given(SIZES, st.sampled_from([0.1, 0.5]))
def test_the_figures_of_several_labels_are_those_of_scikit_learn(sizes: tuple[int, int, int], share: float) -> None:
    samples, classes, seed = sizes
    generator = torch.Generator().manual_seed(seed)
    labels = torch.rand(samples, classes, generator=generator) < share
    logits = torch.randn(samples, classes, generator=generator).mul(2).round().div(2)  # many are equal, some are 0
    truth, chosen = labels.numpy(), logits.numpy() >= 0

    def f1(average: str) -> float:
        return float(f1_score(truth, chosen, average=average, zero_division=np.nan))

    present = truth.any(0)
    precisions = [average_precision_score(truth[:, c], logits[:, c]) if present[c] else None for c in range(classes)]  # type: ignore[index]
    assert average_precision_of_classes(logits, labels) == precisions
    assert mean_average_precision(logits, labels) == pytest.approx(
        average_precision_score(truth[:, present], logits[:, present], average="macro") if present.any() else 0.0  # type: ignore[index]
    )
    expected = average_precision_score(truth, logits, average="micro") if present.any() else 0.0
    assert micro_average_precision(logits, labels) == pytest.approx(expected, abs=1e-12)
    if present.any() or chosen.any():
        assert macro_f1(logits, labels) == pytest.approx(f1("macro"), abs=1e-12)
        assert micro_f1(logits, labels) == pytest.approx(f1("micro"), abs=1e-12)
    of_each = f1_score(truth, chosen, average=None, zero_division=0.0)
    for label, value in enumerate(f1_of_classes(logits, labels)):
        empty = not truth[:, label].any() and not chosen[:, label].any()
        assert (value is None) == empty
        assert value is None or value == pytest.approx(of_each[label], abs=1e-12)
