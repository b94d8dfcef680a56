"""Accelerate's trackers: TensorBoard, Weights & Biases, MLflow, …"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from accel_train.config.compatibility import flatten
from accel_train.config.schema import Config, as_dict
from accel_train.errors import UserError, nearest


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError for an unknown tracker, or one without its package, which Accelerate would silently skip."""
    available = [str(tracker) for tracker in get_available_trackers()]
    known = [str(tracker) for tracker in LOGGER_TYPE_TO_CLASS]
    for name in names:
        if name not in known:
            raise UserError(
                f"--trackers: unknown tracker {name!r}.{nearest(name, known)} Known are {', '.join(sorted(known))}."
            )
        if name not in available:
            raise UserError(f"--trackers: the package of {name!r} is not installed (pip install {name}).")


def start_trackers(config: Config, accelerator: Accelerator) -> None:
    """Start the trackers that the configuration names, with all its settings as hyper-parameters."""
    if config.trackers:
        settings = {name: str(value) for name, value in flatten(as_dict(config)).items()}
        accelerator.init_trackers("accel-train", config=settings)


def track(accelerator: Accelerator, prefix: str, values: Mapping[str, Any], update: int) -> None:
    """Log the numbers among `values` as prefix/name."""
    if accelerator.trackers:
        numbers = {f"{prefix}/{name}": value for name, value in values.items() if isinstance(value, (int, float))}
        accelerator.log(numbers, step=update)


def end_trackers(accelerator: Accelerator) -> None:
    """Let the trackers write the rest. Accelerate's `end_training` would also end the process group."""
    for tracker in accelerator.trackers:
        tracker.finish()
