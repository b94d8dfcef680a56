"""Average precision: a figure of images with several labels, which follows from the order of the logits."""

from __future__ import annotations

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
