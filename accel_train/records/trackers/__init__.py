"""Trackers: a run's curves, settings and result in TensorBoard, Weights & Biases, MLflow, … by Accelerate's classes.

A run that is killed repeats the updates after its last checkpoint, and no value may appear twice. So a tracker gets a
step only when it is final: when a checkpoint of a later update, or of the finished epoch, is complete on the disk, or
the run is finished. All curves come from metrics.jsonl: the training and `accel-train track` send the same.

RUN/trackers.json keeps each tracker's id of the run, and the last step that was sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from accel_train.errors import UserError, nearest


def check_trackers(names: Sequence[str], option: str = "--trackers") -> None:
    """Raise UserError for an unknown tracker, or one without its package, which Accelerate would silently skip."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    available = [str(tracker) for tracker in get_available_trackers()]
    known = [str(tracker) for tracker in LOGGER_TYPE_TO_CLASS]
    for name in names:
        if name not in known:
            raise UserError(
                f"{option}: unknown tracker {name!r}.{nearest(name, known)} Known are {', '.join(sorted(known))}."
            )
        if name not in available:
            raise UserError(f"{option}: the package of {name!r} is not installed (pip install {name}).")
