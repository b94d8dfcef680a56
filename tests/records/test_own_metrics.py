"""A user's metrics are tried before the training, and computed over all samples of a split."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from sklearn.metrics import balanced_accuracy_score, log_loss, roc_auc_score
from torch import Tensor

from accel_train.config.options import parse
from accel_train.errors import EvaluationError, UserError
from accel_train.evaluate import evaluate
from accel_train.records import metrics as own
from accel_train.records.metrics import Evaluation, OwnMetrics
from accel_train.task import ONE_LABEL, SEVERAL_LABELS
from accel_train.user_code import provided

CLASSES, SAMPLES = 3, 50
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(SAMPLES, CLASSES, generator=GENERATOR)
LABELS = torch.randint(CLASSES, (SAMPLES,), generator=GENERATOR)


def created(*texts: str, classes: int = CLASSES, several: bool = False, **objects: Any) -> OwnMetrics:
    splits: Any = SimpleNamespace(classes=("x",) * classes, task=SEVERAL_LABELS if several else ONE_LABEL)
    names = (*texts, *objects)
    with provided({f"metrics:{name}": given for name, given in objects.items()}):
        found = own.create_own_metrics(names, Accelerator(cpu=True), splits)
    assert found is not None
    return found


def refused(*texts: str, **objects: Any) -> str:
    with pytest.raises(UserError) as caught:
        created(*texts, **objects)
    return str(caught.value)


def figures(metrics: OwnMetrics, logits: Tensor = LOGITS, labels: Tensor = LABELS) -> dict[str, float]:
    return metrics.compute(logits, labels, broken=False)


def right(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.argmax(1) == targets).double().mean()


def balanced(logits: Tensor, targets: Tensor) -> float:
    return balanced_accuracy_score(targets, logits.argmax(1))


def wrong(logits: Tensor, targets: Tensor) -> float:
    return 1 - float(right(logits, targets))


wrong.higher_is_better = False  # type: ignore[attr-defined]


def test_functions_give_the_figures_of_scikit_learn() -> None:
    def entropy(logits: Tensor, targets: Tensor) -> float:
        return log_loss(targets, logits.double().softmax(1))

    metrics = created(right=right, balanced=balanced, wrong=wrong, entropy=entropy)
    hits = int((LOGITS.argmax(1) == LABELS).sum())
    expected = {
        "right": hits / SAMPLES,
        "balanced": balanced_accuracy_score(LABELS, LOGITS.argmax(1)),
        "wrong": 1 - hits / SAMPLES,
        "entropy": log_loss(LABELS, LOGITS.double().softmax(1)),
    }
    assert figures(metrics) == pytest.approx(expected, abs=1e-12)
    assert figures(metrics) == pytest.approx(expected, abs=1e-12)  # nothing is left of the first evaluation
    assert "wrong" in metrics.lower_is_better and "loss" in metrics.lower_is_better
    assert not {"right", "balanced"} & metrics.lower_is_better


def test_the_bits_do_not_depend_on_the_threads() -> None:
    logits = torch.randn(90_000, 2, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(90_000) % 2

    def mean(logits: Tensor, targets: Tensor) -> Tensor:
        return logits.exp().mean()  # a sum of torch, which each number of threads divides in another way

    found = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        found.append(figures(created(mean=mean, classes=2), logits, labels))
        assert torch.get_num_threads() == threads
    torch.set_num_threads(1)
    assert found[0] == found[1] == found[2] == found[3]


def test_it_is_in_an_evaluation_also_if_an_output_is_nan() -> None:
    logits = LOGITS
    transform: Any = lambda batch: (logits[batch["ids"]], LABELS[batch["ids"]])  # noqa: E731
    transform.num_classes = CLASSES
    pipeline: Any = SimpleNamespace(
        loader=None,
        batches=[{"ids": ids, "weights": torch.ones(25)} for ids in torch.arange(SAMPLES).split(25)],
        transform=transform, samples=SAMPLES, task=ONE_LABEL,
    )  # fmt: skip
    metrics = created(right=right, balanced=balanced)

    def evaluated() -> Evaluation:
        return evaluate(Accelerator(cpu=True), torch.nn.Identity(), pipeline, own=metrics)

    found = evaluated().metrics
    assert list(found)[-2:] == ["right", "balanced"] and found["right"] == found["accuracy"]
    logits = LOGITS.clone()
    logits[30, 1] = math.nan
    assert all(math.isnan(figure) for figure in evaluated().metrics.values())
    logits = LOGITS
    assert evaluated().metrics == found


def test_nan_is_a_figure() -> None:
    assert math.isnan(figures(created(nothing=lambda logits, targets: math.nan))["nothing"])


def failing_later(logits: Tensor, targets: Tensor) -> float:
    if len(targets) == SAMPLES:
        raise ValueError("no sample of class 2")  # this line
    return 0.5


def test_an_exception_names_the_metric_and_its_line() -> None:
    metrics = created(failing=failing_later, right=right)
    for _ in range(2):
        with pytest.raises(EvaluationError, match="no sample of class 2") as caught:
            figures(metrics)
    line = next(
        n
        for n, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "# this line" in text and "raise" in text
    )
    assert f"({Path(__file__).name}, line {line}, in failing_later: `raise ValueError" in str(caught.value)
    assert "--metrics test_own_metrics.py:failing: ValueError" in str(caught.value)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda logits, targets: logits.mean(0), "returned float32 [3]; expected one number"),
        (lambda logits, targets: {"f1": 0.5}, "returned a dict; expected one number"),
        (lambda logits, targets: "0.5", "returned a str; expected one number"),
        (lambda logits, targets: None, "returned a NoneType; expected one number"),
        (lambda logits, targets: np.array(["x"]), "returned a ndarray; expected one number"),
        (lambda logits, targets: logits.sum(1), "returned float32 [6]; expected one number"),
        (lambda logits: 0.5, "TypeError: "),
        (lambda logits, targets: logits[99], "IndexError: index 99 is out of bounds"),
    ],
)  # fmt: skip
def test_a_metric_that_cannot_be_used_is_told_before_the_training(metric: Callable[..., Any], message: str) -> None:
    assert message in refused(mine=metric)


def test_a_name_without_an_object_or_of_a_built_in_metric_is_refused() -> None:
    assert "--metrics auc: expected FILE.py:NAME, or a function that is given from Python" in refused("auc")
    assert "--metrics top5_accuracy: a built-in metric has this name" in refused(top5_accuracy=right)
    missing = refused("no_such_module_of_mine:auc")
    assert "--metrics no_such_module_of_mine:auc: ModuleNotFoundError" in missing


class Accumulating:
    """A metric of the kind of torchmetrics, which sums over batches."""

    def update(self, logits: Tensor, targets: Tensor) -> None: ...

    def compute(self) -> float:
        return 0.5


@pytest.mark.parametrize("metric", [Accumulating(), Accumulating, torch.nn.MSELoss()])
def test_an_object_or_a_class_is_no_function(metric: Any) -> None:
    message = refused(mine=metric)
    assert f"found an object of type {type(metric).__name__}; expected a function of (logits, targets)" in message


def test_functions_of_torchmetrics_give_the_figures_of_scikit_learn() -> None:
    functions = pytest.importorskip("torchmetrics.functional.classification")
    found = figures(created(area=partial(functions.multiclass_auroc, num_classes=CLASSES)))
    assert found["area"] == pytest.approx(roc_auc_score(LABELS, LOGITS.softmax(1), multi_class="ovr"))
    rows = torch.rand(SAMPLES, CLASSES, generator=torch.Generator().manual_seed(3)) < 0.4
    several = created(several=True, area=partial(functions.multilabel_auroc, num_labels=CLASSES))
    assert figures(several, labels=rows)["area"] == pytest.approx(roc_auc_score(rows, LOGITS))


def told(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(["digits", *words])
    return str(caught.value)


def test_names_are_checked_before_anything_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def accuracy(x, y): ...\ndef auc(x, y): ...\ndef images(x, y): ...\ndef class_f1(x, y): ...\n")
    other = tmp_path / "other.py"
    other.write_text(file.read_text())
    for name in ("accuracy", "images", "class_f1"):
        found = told("--metrics", f"{file}:{name}")
        assert f"--metrics: expected names that no built-in metric has (rename {name}), found" in found
    assert "expected each name once (rename auc), found" in told("--metrics", f"{file}:auc", f"{other}:auc")
    assert f"--metrics: {file} has no 'acu'. Did you mean 'auc'?" in told("--metrics", f"{file}:acu")
    assert "--metrics: 'x' names no function; write FILE.py:NAME." in told("--metrics", "x")
    expected = "--best-metric: expected one of accuracy, loss, f1, map"
    assert f"{expected} (others: name them with --metrics, too), found 'auc'" in told("--best-metric", "auc")
    assert f"{expected} or auc of --metrics, found 'acu' (command line)" in told(
        "--metrics", f"{file}:auc", "--best-metric", "acu"
    )
    config = parse(["digits", "--metrics", f"{file}:auc", "--best-metric", "auc"])
    assert config.metrics == (f"{file}:auc",)
