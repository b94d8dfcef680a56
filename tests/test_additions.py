"""What must be named in several places is named in all: docs/architecture.md, "Where to change what"."""

from __future__ import annotations

import numpy as np
import torch

from accel_train.config.declaration import BEST_METRICS, TAKEN_NAMES
from accel_train.config.declaration import LOSSES as CHECKED_NAMES
from accel_train.config.schema import Loss
from accel_train.data.sources import load
from accel_train.optim.loss import LOSSES, create_loss
from accel_train.task import BUILT_IN_METRICS, LOWER_IS_BETTER, ONE_LABEL, SEVERAL_LABELS, task_of
from accel_train.tools.evaluate_run import EVALUATE_METRICS, added_metrics


def test_each_loss_is_accepted_and_trains() -> None:
    assert (*LOSSES,) == CHECKED_NAMES
    assert {ONE_LABEL.loss, SEVERAL_LABELS.loss} <= {*LOSSES}
    for name in LOSSES:
        logits = torch.randn(4, 3, requires_grad=True)
        losses = create_loss(Loss(name=name), None)(logits, torch.tensor([0, 1, 2, 0]))
        assert losses.shape == (4,)
        losses.mean().backward()
        assert logits.grad is not None and logits.grad.any()


def test_what_may_be_the_best_metric_is_a_metric() -> None:
    assert {*BEST_METRICS} <= {metric.name for metric in BUILT_IN_METRICS}
    assert {*LOWER_IS_BETTER} == {"loss"} <= {*BEST_METRICS}


def test_no_metric_of_a_user_can_have_the_name_of_a_built_in_one() -> None:
    assert {metric.name for metric in [*BUILT_IN_METRICS, *EVALUATE_METRICS]} <= {*TAKEN_NAMES}


def test_no_metric_has_the_name_of_another_figure_of_evaluate() -> None:
    """`accel-train evaluate` writes both into one object."""
    numbers = np.random.default_rng(0)
    logits, labels = numbers.normal(size=(20, 3)).astype(np.float32), np.arange(20) % 3
    for truth in (labels, labels[:, None] == np.arange(3)):
        task = task_of(torch.from_numpy(truth))
        more = added_metrics(logits, truth)
        assert not {metric.name for metric in task.metrics} & more.keys()


def test_data_sets_in_memory_have_names() -> None:
    assert {*load.IN_MEMORY} <= {*load.known_sources()}
