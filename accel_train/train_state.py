"""Where a run is: what the training loop counts, and a checkpoint keeps."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from accel_train.errors import UserError
from accel_train.untrusted import LARGEST, is_count, is_number


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
        """What `dataclasses.asdict` made of it, as the checkpoint `path` has it. Raises UserError if it has more, or
        what no run can have counted."""
        if unknown := saved.keys() - {each.name for each in fields(cls)}:
            raise UserError(f"{path} was written by a newer accel-train, which counts {', '.join(sorted(unknown))}.")
        state = cls(**saved)
        if name := next((name for name in ("update", "epoch") if name not in saved), "") or state._impossible():
            raise UserError(
                f"{path / 'state.json'}: {name} is {str(saved.get(name, 'missing'))[:40]!r}, which no run can have "
                f"counted. If you do not trust it, delete {path}; the checkpoint before it is used then."
            )
        if path.name.startswith("update-") and path.name != f"update-{state.update:08d}":
            raise UserError(f"{path} holds the checkpoint of update {state.update}: give it its name back.")
        return state

    def check_position(self, updates_per_epoch: int, path: Path) -> None:
        """Raise UserError unless the update is one of the epoch's. `path`: where the checkpoints lie."""
        first = self.epoch * updates_per_epoch
        if not first <= self.update <= first + updates_per_epoch:
            raise UserError(
                f"The checkpoint in {path} is of update {self.update} in epoch {self.epoch + 1}, but with "
                f"{updates_per_epoch} updates an epoch that one has {first} to {first + updates_per_epoch}: it does "
                "not fit this run's data and batch size."
            )

    def _impossible(self) -> str:
        """The name of a number that is out of its range or of another type, or ""."""
        fits = {
            "update": is_count(self.update),
            "epoch": is_count(self.epoch) and is_count(self.update) and self.epoch <= self.update,
            "samples_seen": is_count(self.samples_seen),
            "best_accuracy": self.best_accuracy is None or is_number(self.best_accuracy, most=1),
            "best_update": self.best_update is None or is_count(self.best_update),
            "epoch_loss_sum": is_number(self.epoch_loss_sum, -LARGEST),
            "epoch_count": is_count(self.epoch_count),
            "epoch_correct": is_number(self.epoch_correct),
            "train_seconds": is_number(self.train_seconds),
            "timed_samples": is_count(self.timed_samples),
            "left_out": isinstance(self.left_out, list) and all(is_count(number, 1) for number in self.left_out),
        }
        return next((name for name, fit in fits.items() if not fit), "")
