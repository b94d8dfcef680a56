"""The figures of a model on a split."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Evaluation:
    """The figures of one split. Accuracies are from 0 to 1; `loss` is the mean cross-entropy, without smoothing."""

    loss: float
    accuracy: float
    top5_accuracy: float  # among the min(5, classes) highest
    count: int
    confusion: list[list[int]]  # [true class][predicted class]: number of samples

    @property
    def class_accuracy(self) -> list[float | None]:
        """Accuracy among the samples of each class; None for a class without any."""
        return [row[at] / sum(row) if sum(row) else None for at, row in enumerate(self.confusion)]
