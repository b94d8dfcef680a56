"""Figures of a split that follow from its labels and the model's logits: precision, recall, calibration, intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BINS = 15  # of the calibration error, as in Guo et al. 2017


def single_label_figures(logits: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Figures of images with one label each, from logits float32 [n, classes] and labels int64 [n].

    Precision, recall and F1 are scikit-learn's; "precision" and so on are means over the classes that occur as a label
    or as a prediction, "weighted_…" means weighted by the images of each class. "class_…" are lists, None for a class
    that does not occur. "balanced_accuracy": the mean recall of the classes that have an image. For the others see
    `accuracy_interval` and `calibration`.
    """
    predicted = logits.argmax(1)
    figures = _precision_and_recall(labels, predicted, np.arange(logits.shape[1]))
    error, diagram = calibration(softmax(logits), labels)
    return {
        "accuracy_interval": accuracy_interval(int((predicted == labels).sum()), len(labels)),
        "balanced_accuracy": float(np.mean([figures["class_recall"][label] for label in np.unique(labels)])),
        **figures,
        "calibration_error": error,
        "calibration": diagram,
    }


def multi_label_figures(logits: npt.NDArray[np.float32], labels: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Figures of images with several labels or none, at a probability of 0.5; as `single_label_figures`, as far as
    they have a meaning. labels: bool [n, classes]."""
    return _precision_and_recall(labels, logits >= 0, np.arange(logits.shape[1]))


def _precision_and_recall(
    labels: npt.NDArray[Any], predicted: npt.NDArray[Any], classes: npt.NDArray[np.int64]
) -> dict[str, Any]:
    from sklearn.metrics import precision_recall_fscore_support

    names = ("precision", "recall", "f1")
    *of_each, images = precision_recall_fscore_support(labels, predicted, labels=classes, zero_division=0)
    said = predicted.sum(0) if predicted.ndim == 2 else np.bincount(predicted, minlength=len(classes))
    occurs = (images > 0) | (said > 0)
    figures: dict[str, Any] = {}
    for name, values in zip(names, of_each, strict=True):
        figures[name] = float(values[occurs].mean()) if occurs.any() else 0.0
        figures[f"weighted_{name}"] = float(np.average(values, weights=images)) if images.any() else 0.0
    return figures | {
        f"class_{name}": [float(value) if known else None for value, known in zip(values, occurs, strict=True)]
        for name, values in zip(names, of_each, strict=True)
    }


def accuracy_interval(hits: int, count: int, level: float = 0.95) -> tuple[float, float]:
    """The bootstrap interval of an accuracy of `hits` in `count`: (lowest, highest), the percentiles of `level`.

    Drawing the images anew, with replacement, gives a binomial number of hits. So the percentiles of infinitely many
    draws are known, and none has to be made (Efron 1979, "Bootstrap methods", section 2).
    """
    from scipy.stats import binom

    low, high = binom.ppf([(1 - level) / 2, (1 + level) / 2], count, hits / count) / count
    return float(low), float(high)


def softmax(logits: npt.NDArray[np.float32], temperature: float = 1.0) -> Floats:
    """Probabilities float64 [n, classes]."""
    from scipy.special import softmax as scipy_softmax

    probabilities: Floats = scipy_softmax(logits.astype(np.float64) / temperature, axis=1)
    return probabilities


def calibration(probabilities: Floats, labels: npt.NDArray[np.int64]) -> tuple[float, list[dict[str, float]]]:
    """The expected calibration error and its bins, each {"confidence", "accuracy", "count"}; empty bins are left out.

    The images are divided by the probability of the predicted class into BINS bins of equal width. The error is the
    mean over the images of |accuracy - mean probability| of their bin (Guo et al. 2017, arxiv.org/abs/1706.04599,
    equation 3).
    """
    confidence = probabilities.max(1)
    hits = probabilities.argmax(1) == labels
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    diagram = []
    for number in range(BINS):
        inside = bins == number
        if inside.any():
            mean, accuracy = float(confidence[inside].mean()), float(hits[inside].mean())
            diagram.append({"confidence": mean, "accuracy": accuracy, "count": int(inside.sum())})
    error = sum(entry["count"] * abs(entry["accuracy"] - entry["confidence"]) for entry in diagram) / len(labels)
    return error, diagram


def negative_log_likelihood(
    logits: npt.NDArray[np.float32], labels: npt.NDArray[np.int64], temperature: float = 1.0
) -> float:
    """The mean cross-entropy of the logits divided by `temperature`."""
    from scipy.special import logsumexp

    scaled = logits.astype(np.float64) / temperature
    return float((logsumexp(scaled, axis=1) - scaled[np.arange(len(labels)), labels]).mean())


def fit_temperature(logits: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> float:
    """The temperature by which to divide logits so that their negative log-likelihood is lowest (Guo et al. 2017,
    section 4.2), between 0.01 and 100. Fit it on samples that the model was not trained on."""
    from scipy.optimize import minimize_scalar

    # The likelihood has one minimum in 1 / temperature, and so in its logarithm.
    found = minimize_scalar(
        lambda exponent: negative_log_likelihood(logits, labels, float(np.exp(exponent))),
        bounds=(float(np.log(0.01)), float(np.log(100))),
        method="bounded",
        options={"xatol": 1e-6},
    )
    return float(np.exp(found.x))
