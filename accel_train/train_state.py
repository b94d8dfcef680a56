"""Where a run is: what the training loop counts, and a checkpoint keeps."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from accel_train.errors import UserError


@dataclass
class TrainState:
    """The position of a run and what it has counted. All numbers are of all processes together."""

    epoch: int = 0
    """The epoch that the next update belongs to."""
    update: int = 0
    """Updates done, in all; at an epoch's start a multiple of the updates of an epoch."""
    samples_seen: int = 0
    best_accuracy: float | None = None
    """The best validation accuracy so far (0..1)."""
    best_update: int | None = None
    """The update after which it was found."""
    epoch_loss_sum: float = 0.0
    """With the next two, of the epoch under way: sums over its samples; exact training figures after a
    resume."""
    epoch_correct: int = 0
    epoch_count: int = 0
    train_seconds: float = 0.0
    """Time of training, without the first update of each start (see `meter.Stopwatch`)."""
    timed_samples: int = 0
    """The samples trained in it."""
    left_out: list[int] = field(default_factory=list)
    """The updates, counted from 1, that were not finite and are left out; see `nonfinite`."""

    @classmethod
    def from_saved(cls, saved: dict[str, Any], path: Path) -> TrainState:
        """What `dataclasses.asdict` made of it, as the checkpoint `path` has it. Raises UserError if it has more."""
        if unknown := saved.keys() - {each.name for each in fields(cls)}:
            raise UserError(f"{path} was written by a newer accel-train, which counts {', '.join(sorted(unknown))}.")
        return cls(**saved)
