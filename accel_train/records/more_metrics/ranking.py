"""Figures of a split that follow from the order of its logits: average precision and AUROC."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from torch import Tensor


def average_precision_of_classes(logits: Tensor, labels: Tensor) -> list[float | None]:
    """The average precision of each class, as scikit-learn's `average_precision_score`; None without an image of it.

    Here and below: logits float32 [n, classes], labels bool [n, classes].
    """
    pairs = zip(logits.T.numpy(), labels.T.numpy(), strict=True)
    return [_average_precision(scores, truth) if truth.any() else None for scores, truth in pairs]


def mean_average_precision(logits: Tensor, labels: Tensor) -> float:
    """mAP: the mean of the average precision over the classes that an image has; 0 if there is no label at all."""
    present = [value for value in average_precision_of_classes(logits, labels) if value is not None]
    return sum(present) / len(present) if present else 0.0


def micro_average_precision(logits: Tensor, labels: Tensor) -> float:
    """The average precision over all pairs of an image and a class together; 0 if there is no label at all."""
    return _average_precision(logits.flatten().numpy(), labels.flatten().numpy()) if labels.any() else 0.0


def _average_precision(scores: npt.NDArray[np.float32], truth: npt.NDArray[np.bool_]) -> float:
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(truth, scores))


def auroc(logits: Tensor, targets: Tensor) -> float:
    """The area under the ROC curve, as scikit-learn's `roc_auc_score`: logits float32 [n, classes], targets int64 [n],
    or [n, classes] of 0 and 1.

    Of two classes that of the second. Of more, each class against all others by its probability, and of images with
    several labels by its logit; then the mean over the classes. A class that no image has, or that all have, has no
    such area and is left out of the mean. NaN if that is so of all.
    """
    scores, labels = logits.double(), targets.numpy()
    if targets.ndim == 1:
        scores = scores.softmax(1)
        labels = labels[:, None] == np.arange(logits.shape[1])
        if logits.shape[1] == 2:
            scores, labels = scores[:, 1:], labels[:, 1:]
    from sklearn.metrics import roc_auc_score

    pairs = zip(scores.numpy().T, labels.T.astype(bool), strict=True)
    areas = [float(roc_auc_score(truth, values)) for values, truth in pairs if truth.any() and not truth.all()]
    return math.fsum(areas) / len(areas) if areas else math.nan
