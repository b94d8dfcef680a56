"""task.py: the labels decide whether an image has one or several, and nothing else does; the metrics of both."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score
from torch import Tensor

from accel_train.config.options import parse
from accel_train.config.schema import Loss
from accel_train.errors import UserError
from accel_train.optim.loss import check_task
from accel_train.records.model_info import FILE, ModelInfo, read_model_info
from accel_train.task import (
    ONE_LABEL,
    SEVERAL_LABELS,
    MeanMetric,
    Task,
    average_precision_of_classes,
    f1_of_classes,
    highest,
    macro_f1,
    mean_average_precision,
    task_of,
)

LOGITS = torch.tensor([[2.0, 1.0, -1.0], [-3.0, -2.0, -1.0]])


def test_a_recipe_with_binary_cross_entropy_has_one_label_if_its_data_has() -> None:
    loss = parse(["imagenet_resnet50_a2"]).loss
    assert loss.name == "binary_cross_entropy"
    task = task_of(torch.tensor([2, 0, 1]))
    check_task(loss, task)
    assert task is ONE_LABEL and task.best_metric == "accuracy"
    assert [metric.name for metric in task.training_metrics] == ["loss", "accuracy"]
    assert task.training_loss(loss.name) == "training loss (binary_cross_entropy)" and not task.training_loss(task.loss)
    assert torch.equal(task.probabilities(LOGITS), LOGITS.softmax(1))


def test_rows_of_bools_are_several_labels() -> None:
    task = task_of(torch.tensor([[True, True, False], [False, False, False]]))
    check_task(Loss(name="binary_cross_entropy"), task)
    assert task is SEVERAL_LABELS and task.best_metric == "map"
    assert [metric.name for metric in task.training_metrics] == ["loss"]
    assert torch.equal(task.probabilities(LOGITS), LOGITS.sigmoid())
    for loss in (Loss(), Loss(name="binary_cross_entropy", class_weights="balanced")):
        check_task(loss, ONE_LABEL)
        with pytest.raises(UserError, match="expects one label for each image"):
            check_task(loss, task)


@pytest.mark.parametrize(
    ("task", "targets", "labels"),
    [
        (ONE_LABEL, torch.tensor([2, 0]), torch.tensor([2, 0])),
        (ONE_LABEL, torch.tensor([[0.1, 0.2, 0.7], [0.6, 0.4, 0.0]]), torch.tensor([2, 0])),
        (SEVERAL_LABELS, torch.tensor([[0.5, 1.0, 0.4], [0.0, 0.0, 0.0]]), torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()),
    ],
)
def test_targets_stand_for_labels(task: Task, targets: Tensor, labels: Tensor) -> None:
    assert torch.equal(task.labels_of(targets), labels)


@pytest.mark.parametrize("task", [ONE_LABEL, SEVERAL_LABELS])
def test_made_up_targets_are_the_tasks_and_have_each_class(task: Task) -> None:
    targets = task.example_targets(6, 3)
    labels = task.labels_of(targets)
    assert len(targets) == 6 and task_of(labels) is task
    assert bool(labels.any(0).all()) if task is SEVERAL_LABELS else sorted(set(labels.tolist())) == [0, 1, 2]


@pytest.mark.parametrize(("task", "several"), [(ONE_LABEL, False), (SEVERAL_LABELS, True)])
def test_model_json_says_which_it_is(task: Task, several: bool, tmp_path: Path) -> None:
    info = ModelInfo(("a", "b"), 3, 32, None, (0.5,) * 3, (0.5,) * 3, task=task)
    (tmp_path / FILE).write_text(info.to_json())
    assert json.loads(info.to_json())["multi_label"] is several
    assert read_model_info(tmp_path) == info == copy.deepcopy(info) == pickle.loads(pickle.dumps(info))
    (tmp_path / FILE).write_text(info.to_json().replace(f'"multi_label": {json.dumps(several)}', '"multi_label": 1'))
    with pytest.raises(UserError, match=r"is damaged .*multi_label is 1"):
        read_model_info(tmp_path)


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
    logits, (top5,) = (
        torch.arange(10.0).repeat(10, 1),
        [each for each in ONE_LABEL.metrics if each.name == "top5_accuracy"],
    )
    assert isinstance(top5, MeanMetric)
    assert top5.score(top5.predict(logits), torch.arange(10)).tolist() == [False] * 5 + [True] * 5


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
    present = truth.any(0)
    precisions = [average_precision_score(truth[:, c], logits[:, c]) if present[c] else None for c in range(classes)]  # type: ignore[index]
    assert average_precision_of_classes(logits, labels) == precisions
    assert mean_average_precision(logits, labels) == pytest.approx(
        average_precision_score(truth[:, present], logits[:, present], average="macro") if present.any() else 0.0  # type: ignore[index]
    )
    if present.any() or chosen.any():
        assert macro_f1(logits, labels) == pytest.approx(
            f1_score(truth, chosen, average="macro", zero_division=np.nan), abs=1e-12
        )
    of_each = f1_score(truth, chosen, average=None, zero_division=0.0)
    for label, value in enumerate(f1_of_classes(logits, labels)):
        empty = not truth[:, label].any() and not chosen[:, label].any()
        assert (value is None) == empty
        assert value is None or value == pytest.approx(of_each[label], abs=1e-12)
