"""records/own_metrics.py: a user's metrics are tried before the training, and computed over all samples of a split."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, log_loss, roc_auc_score
from torch import Tensor

from accel_train.config.options import parse
from accel_train.errors import MetricError, UserError
from accel_train.evaluate import evaluate
from accel_train.records import own_metrics as own
from accel_train.records.metrics import Evaluation
from accel_train.records.own_metrics import OwnMetrics, auroc
from accel_train.user_code.objects import provided

CLASSES, SAMPLES = 3, 50
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(SAMPLES, CLASSES, generator=GENERATOR)
LABELS = torch.randint(CLASSES, (SAMPLES,), generator=GENERATOR)


def created(
    *texts: str, samples: int = SAMPLES, classes: int = CLASSES, several: bool = False, **objects: Any
) -> OwnMetrics:
    splits: Any = SimpleNamespace(classes=("x",) * classes, multi_label=several)
    names = (*texts, *objects)
    with provided({f"metrics:{name}": given for name, given in objects.items()}):
        found = own.create_own_metrics(names, Accelerator(cpu=True), splits, samples)
    assert found is not None
    return found


def refused(*texts: str, **objects: Any) -> str:
    with pytest.raises(UserError) as caught:
        created(*texts, **objects)
    return str(caught.value)


def figures(metrics: OwnMetrics, logits: Tensor = LOGITS, labels: Tensor = LABELS, batch: int = 16) -> dict[str, float]:
    """Those of an evaluation in batches of so many samples, of which the last one has padding."""
    metrics.begin(len(logits))
    for first in range(0, len(logits), batch):
        ids = torch.arange(first, first + batch)
        padded = ids % len(logits)
        metrics.add(torch.where(ids < len(logits), ids, -1), labels[padded], logits[padded])
    return metrics.finish()


def right(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.argmax(1) == targets).double().mean()


def balanced(logits: Tensor, targets: Tensor) -> float:
    return balanced_accuracy_score(targets, logits.argmax(1))


class Counted:
    """A metric of the accumulating kind without torchmetrics."""

    higher_is_better = False

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def reset(self) -> None:
        self.wrong = self.count = 0

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self.wrong += int((logits.argmax(1) != targets).sum())
        self.count += len(targets)
        self.sizes.append(len(targets))

    def compute(self) -> float:
        return self.wrong / self.count


def test_both_kinds_give_the_figures_of_scikit_learn() -> None:
    def entropy(logits: Tensor, targets: Tensor) -> float:
        return log_loss(targets, logits.double().softmax(1))

    metrics = created("auroc", right=right, balanced=balanced, wrong=Counted, entropy=entropy)
    assert {each.name for each in metrics.metrics if each.accumulates} == {"wrong"}
    hits = int((LOGITS.argmax(1) == LABELS).sum())
    expected = {
        "auroc": roc_auc_score(LABELS, LOGITS.double().softmax(1), multi_class="ovr"),
        "right": hits / SAMPLES,
        "balanced": balanced_accuracy_score(LABELS, LOGITS.argmax(1)),
        "wrong": 1 - hits / SAMPLES,
        "entropy": log_loss(LABELS, LOGITS.double().softmax(1)),
    }
    assert figures(metrics) == pytest.approx(expected, abs=1e-12)
    assert figures(metrics) == pytest.approx(expected, abs=1e-12)  # nothing is left of the first evaluation
    assert "wrong" in metrics.lower_is_better and "loss" in metrics.lower_is_better
    assert not {"auroc", "right", "balanced"} & metrics.lower_is_better


def test_the_bits_depend_neither_on_the_batches_nor_on_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "CHUNK", 40_000)
    logits = torch.randn(90_000, 2, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(90_000) % 2

    def mean(logits: Tensor, targets: Tensor) -> Tensor:
        return logits.exp().mean()  # a sum of torch, which each number of threads divides in another way

    class Sums(Counted):
        def update(self, logits: Tensor, targets: Tensor) -> None:
            super().update(logits, targets)
            self.total = getattr(self, "total", 0.0) + logits.exp().sum()

        def reset(self) -> None:
            super().reset()
            self.total = torch.zeros(())

        def compute(self) -> Tensor:  # type: ignore[override]
            return self.total

    found = []
    for threads, batch in ((1, 4000), (2, 999), (3, 90_000), (4, 60_000)):
        torch.set_num_threads(threads)
        sums = Sums()
        found.append(figures(created(mean=mean, sums=sums, classes=2), logits, labels, batch))
        assert sums.sizes[-3:] == [40_000, 40_000, 10_000]
        assert torch.get_num_threads() == threads
    torch.set_num_threads(1)
    assert found[0] == found[1] == found[2] == found[3]


def test_it_is_in_an_evaluation_also_if_an_output_is_nan() -> None:
    logits = LOGITS
    transform: Any = lambda batch: (logits[batch["ids"]], LABELS[batch["ids"]])  # noqa: E731
    transform.num_classes = CLASSES
    pipeline: Any = SimpleNamespace(
        batches=[{"ids": ids, "weights": torch.ones(25)} for ids in torch.arange(SAMPLES).split(25)],
        transform=transform, samples=SAMPLES, multi_label=False,
    )  # fmt: skip
    metrics = created("auroc", right=right)

    def evaluated() -> Evaluation:
        return evaluate(Accelerator(cpu=True), torch.nn.Identity(), pipeline, own=metrics)

    found = evaluated().figures
    assert list(found)[-2:] == ["auroc", "right"] and found["right"] == found["accuracy"]
    logits = LOGITS.clone()
    logits[30, 1] = math.nan
    assert all(math.isnan(figure) for figure in evaluated().figures.values())
    logits = LOGITS
    assert evaluated().figures == found


def test_nan_is_a_figure() -> None:
    assert math.isnan(figures(created(nothing=lambda logits, targets: math.nan))["nothing"])


def failing_later(logits: Tensor, targets: Tensor) -> float:
    if len(targets) == SAMPLES:
        raise ValueError("no sample of class 2")  # this line
    return 0.5


def test_an_exception_names_the_metric_and_its_line() -> None:
    metrics = created(failing=failing_later, right=right)
    for _ in range(2):
        with pytest.raises(MetricError, match="no sample of class 2") as caught:
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
    assert "--metrics auc: no metric of this package, and not given as an object" in refused("auc")
    assert "--metrics auroc: a built-in figure has this name" in refused(auroc=right)
    missing = refused("no_such_module_of_mine:auc")
    assert "--metrics no_such_module_of_mine:auc: ModuleNotFoundError" in missing


def area(logits: Tensor, targets: Tensor) -> float:
    return float(roc_auc_score(targets, logits))


def test_the_logits_of_a_large_split_are_not_kept() -> None:
    samples = own.MOST_BYTES // (4 * CLASSES) + 1
    message = refused(balanced=balanced, samples=samples)
    assert "needs the results of all 357,913,942 images of a split at once, 4.0 GiB; at most 4 GiB are kept" in message
    assert "Use a metric that accumulates" in message
    created(wrong=Counted, samples=samples)
    created(balanced=balanced, samples=samples - 1)
    assert "of all 178,956,971 images of a split at once, 6.0 GiB" in refused(
        auc=area, samples=samples // 2, several=True
    )


def test_only_the_next_samples_are_taken() -> None:
    metrics = created(right=right)
    metrics.begin(SAMPLES)
    with pytest.raises(RuntimeError, match="after 0 samples"):
        metrics.add(torch.arange(5, 10), LABELS[5:10], LOGITS[5:10])


class TestTorchmetrics:
    def test_objects_and_classes_are_taken_as_they_are(self) -> None:
        torchmetrics = pytest.importorskip("torchmetrics")
        kinds = torchmetrics.classification
        metrics = created(
            "torchmetrics.classification:MulticlassF1Score",
            made=kinds.MulticlassAUROC(CLASSES),
            micro=kinds.MulticlassAccuracy(CLASSES, average="micro"),
            hinge=kinds.MulticlassHingeLoss(CLASSES),
        )
        assert all(each.accumulates for each in metrics.metrics)
        found = figures(metrics)
        assert found["micro"] == pytest.approx(float(right(LOGITS, LABELS)))
        assert found["made"] == pytest.approx(roc_auc_score(LABELS, LOGITS.softmax(1), multi_class="ovr"))
        assert figures(metrics, batch=7) == found
        assert "hinge" in metrics.lower_is_better and "made" not in metrics.lower_is_better

    def test_one_with_several_figures_is_refused(self) -> None:
        torchmetrics = pytest.importorskip("torchmetrics")
        message = refused(mine=torchmetrics.classification.MulticlassF1Score(CLASSES, average=None))
        assert "returned float32 [3]; expected one number, as with average='macro'" in message

    def test_of_several_labels(self) -> None:
        torchmetrics = pytest.importorskip("torchmetrics")
        rows = torch.rand(SAMPLES, CLASSES, generator=torch.Generator().manual_seed(3)) < 0.4
        metrics = created("auroc", several=True, area=torchmetrics.classification.MultilabelAUROC)
        found = figures(metrics, labels=rows)
        assert found["area"] == pytest.approx(found["auroc"]) == pytest.approx(roc_auc_score(rows, LOGITS))


SIZES = st.tuples(st.integers(1, 40), st.integers(2, 5), st.integers(0, 2**32 - 1))


@pytest.mark.ci
@given(SIZES, st.booleans())
def test_the_area_under_the_roc_curve_is_that_of_scikit_learn(sizes: tuple[int, int, int], several: bool) -> None:
    samples, classes, seed = sizes
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(samples, classes, generator=generator).mul(2).round().div(2)  # many are equal
    if several:
        labels, scores = torch.rand(samples, classes, generator=generator) < 0.4, logits
        rows = labels.numpy()
    else:
        labels = torch.randint(classes, (samples,), generator=generator)
        scores, rows = logits.double().softmax(1), labels.numpy()[:, None] == np.arange(classes)
    known = [column for column in range(classes) if rows[:, column].any() and not rows[:, column].all()]
    if classes == 2 and not several:
        known = known[-1:]
    found = auroc(logits, labels.long())
    if not known:
        assert math.isnan(found)
        return
    areas = [roc_auc_score(rows[:, column], scores[:, column]) for column in known]
    assert found == pytest.approx(float(np.mean(areas)), abs=1e-12)
    if len(known) == classes and classes > 2 and not several:
        assert found == pytest.approx(roc_auc_score(labels, scores, multi_class="ovr"), abs=1e-12)


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
        found = told("--metrics", f"{file}:{name}", "auroc")
        assert f"--metrics: expected names that no built-in figure has (rename {name}), found" in found
    assert "expected each name once (rename auc), found" in told("--metrics", f"{file}:auc", f"{other}:auc")
    assert f"--metrics: {file} has no 'acu'. Did you mean 'auc'?" in told("--metrics", f"{file}:acu")
    assert "'aurocc' is not a metric of this package. Did you mean 'auroc'?" in told("--metrics", "aurocc")
    assert "It is none of auroc, top5_accuracy. For your own, write FILE.py:NAME." in told("--metrics", "x")
    expected = "--best-metric: expected one of accuracy, loss, f1, map"
    assert f"{expected} (others: name them with --metrics, too), found 'auc'" in told("--best-metric", "auc")
    assert f"{expected} or auroc, auc of --metrics, found 'acu' (command line)" in told(
        "--metrics", "auroc", f"{file}:auc", "--best-metric", "acu"
    )
    config = parse(["digits", "--metrics", f"{file}:auc", "top5_accuracy", "--best-metric", "auc"])
    assert config.metrics == (f"{file}:auc", "top5_accuracy")
