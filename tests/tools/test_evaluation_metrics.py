"""The metrics of `accel-train evaluate` alone, beside scikit-learn, a plain loop and scipy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax as scipy_softmax
from sklearn.metrics import (
    balanced_accuracy_score,
    precision_recall_fscore_support,
    precision_score,
    recall_score,
)

from accel_train.tools.evaluate_run import (
    accuracy_interval,
    added_metrics,
    calibration_error,
)


def drawn(samples: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(seed)
    labels = numbers.integers(classes, size=samples)
    logits = numbers.normal(size=(samples, classes)) * 2
    logits[np.arange(samples), labels] += 1.5
    return logits.astype(np.float32), labels


@pytest.mark.ci
@given(st.integers(1, 40), st.integers(2, 7), st.integers(0, 10**6))
def test_precision_and_recall_are_those_of_scikit_learn(samples: int, classes: int, seed: int) -> None:
    logits, labels = drawn(samples, classes, seed)
    predicted, found = logits.argmax(1), added_metrics(logits, labels)
    expected = precision_recall_fscore_support(labels, predicted, average="macro", zero_division=0)
    assert [found["precision"], found["recall"]] == pytest.approx(expected[:2])
    present = np.isin(predicted, labels)
    others = np.where(present, predicted, labels.max() + 1)
    if present.all() and len(np.unique(labels)) > 1:  # scikit-learn warns otherwise
        assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, others))
    each = recall_score(labels, predicted, labels=range(classes), average=None, zero_division=0)
    assert found["balanced_accuracy"] == pytest.approx(np.mean([each[label] for label in np.unique(labels)]))
    for label, value in enumerate(found["class_recall"]):
        assert value is None if label not in labels and label not in predicted else value == each[label]


def test_several_labels_an_image() -> None:
    logits, _ = drawn(50, 4, 0)
    labels = np.random.default_rng(1).random((50, 4)) < 0.4
    found = added_metrics(logits, labels)
    assert found["precision"] == pytest.approx(precision_score(labels, logits >= 0, average="macro"))
    assert found["class_recall"] == pytest.approx(recall_score(labels, logits >= 0, average=None).tolist())
    assert "accuracy_interval" not in found


def test_the_calibration_error_by_a_plain_loop() -> None:
    logits, labels = drawn(500, 5, 3)
    probabilities = scipy_softmax(logits.astype(np.float64), axis=1)
    error = calibration_error(probabilities, labels)
    bins: dict[int, list[tuple[float, bool]]] = {}
    for row, label in zip(probabilities, labels, strict=True):
        bins.setdefault(int(row.max() * 15), []).append((row.max(), row.argmax() == label))
    expected = sum(abs(sum(p for p, _ in each) - sum(hit for _, hit in each)) for each in bins.values()) / 500
    assert error == pytest.approx(expected)
    sure = np.array([[1.0, 0.0]] * 4)  # a probability of 1 belongs to the last bin
    assert calibration_error(sure, np.array([0, 0, 0, 1])) == pytest.approx(0.25)


def test_all_of_a_few_images_right_leave_a_doubt() -> None:
    assert accuracy_interval(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert accuracy_interval(180, 200) == pytest.approx((0.8506, 0.9343), abs=1e-4)
