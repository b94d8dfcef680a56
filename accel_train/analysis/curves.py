"""The curves of a run as a figure of matplotlib, for a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accel_train.errors import needing


def plot_curves(
    training: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], title: str, training_loss: str = ""
) -> Any:
    """Return a Figure: the loss, and the accuracy or the mean average precision, over the updates of a run.

    `training`, `evaluations`: the lines of metrics.jsonl of these kinds. `training_loss`: its name, if it is not what
    evaluation computes; it is drawn apart then. Raises UserError without matplotlib.
    """
    with needing("matplotlib is not installed: pip install 'accel-train[plot]'."):
        from matplotlib import pyplot
    second = next((name for name in ("accuracy", "map") if any(name in row for row in evaluations)), "accuracy")
    curves: dict[str, list[Mapping[str, Any]]] = {"training": list(training)}
    for row in evaluations:
        if row["split"] != "train":  # the mean of an epoch's training
            curves.setdefault(str(row["split"]), []).append(row)
    held_out = [name for name in curves if name != "training"]
    panels = {"loss": ("loss", held_out if training_loss else [*curves]), second: (second, [*curves])}
    if training_loss:
        panels = {training_loss: ("loss", ["training"]), **panels}
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 3.5), layout="constrained")
    for (label, (metric, names)), axis in zip(panels.items(), axes, strict=True):
        for name in names:
            rows = curves[name]
            points = [(row["update"], row[metric]) for row in rows if row.get(metric) is not None]
            if points:
                axis.plot(
                    *zip(*points, strict=True), label=name, marker="" if name == "training" else "o", markersize=3
                )
        axis.set(xlabel="update", title=label)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    figure.suptitle(title)
    pyplot.close(figure)  # a notebook shows what a cell returns, and would show an open one again
    return figure
