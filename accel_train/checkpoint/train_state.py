"""The position of a run: what the training loop counts and a checkpoint saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from accel_train.config.schema import Config
from accel_train.data.order import Plan
from accel_train.errors import UserError
from accel_train.files import LARGEST, is_count, is_number

FITS: dict[str, Callable[[Any], bool]] = {
    "int": is_count,
    "int | None": lambda value: value is None or is_count(value),
    "float": lambda value: is_number(value, -LARGEST),
    "float | None": lambda value: value is None or is_number(value, -LARGEST),
    "dict[str, float]": lambda values: (
        isinstance(values, dict) and all(is_number(v, -LARGEST) for v in values.values())
    ),
}
"""Type of an entry of a position -> whether a value of a checkpoint can be one."""


@dataclass
class TrainState:
    """The position of a run and its counts. All numbers are totals over all processes."""

    epoch: int = 0
    """The epoch that the next update belongs to."""
    update: int = 0
    """Updates done since the start of the run."""
    epoch_samples: int = 0
    """Samples of the epoch whose updates are done or skipped: where the next update begins in the epoch's order.
    Unlike a number of updates, it means the same with any batch size."""
    epoch_left_out: int = 0
    """Those of them that cannot be read, or whose updates were skipped; all others are in epoch_count."""
    samples_seen: int = 0
    best_value: float | None = None
    """The best value so far of --best-metric."""
    best_update: int | None = None
    """The update after which it was measured."""
    best_epoch: int | None = None
    """The epochs that were done then."""
    wall_seconds: float = 0.0
    """How long the run has lasted, all starts together, from each one's beginning to its last save or end of an epoch.
    What was done after the last save before a kill, and has to be done again, is counted once."""
    epoch_loss_sum: float = 0.0
    """This and the next two are sums over the samples of the current epoch, so that its training metrics are exact
    after a resume."""
    epoch_correct: int = 0
    epoch_count: int = 0
    epoch_sums: dict[str, float] = field(default_factory=dict)
    """The same of metrics other than loss and accuracy that are counted in training, by name."""
    train_seconds: float = 0.0
    """Training time in seconds, without the first update of each start (see `meter.Stopwatch`)."""
    timed_samples: int = 0
    """The samples trained in that time."""
    evaluated: int | None = None
    """The newest update within an epoch after which the run has evaluated, as --eval-every-updates or its end asks."""
    skipped_updates: int = 0
    """Updates that were skipped because their loss or gradient was not finite; see run/nonfinite.py."""
    skipped_in_a_row: int = 0
    """How many of them are the newest updates."""

    def check_position(self, samples: int, path: Path) -> None:
        """Raise UserError if a run with so many training samples cannot be at this position. `path`: the folder of the
        checkpoints, for the message."""
        counted = self.epoch_count + self.epoch_left_out
        most = self.epoch_samples if self.epoch == 0 else self.update  # every update has at least one sample
        if not counted == self.epoch_samples <= samples or self.update > most:
            raise UserError(
                f"The checkpoint of update {self.update} in {path} does not fit the training data, which has {samples} "
                f"samples: update {self.update} is not in epoch {self.epoch + 1} of it. Has the data changed?"
            )

    def check_epoch(self, plan: Plan) -> None:
        """At the end of an epoch, or of the run within it: raise RuntimeError unless every sample until there was
        counted once or is in a skipped update."""
        done = self.epoch_samples
        counted = self.epoch_count + self.epoch_left_out
        if counted != done or done > plan.samples or plan.updates_left(self.epoch, done):
            raise RuntimeError(
                f"epoch {self.epoch + 1} counted {self.epoch_count} samples and skipped {self.epoch_left_out}, in "
                f"updates of {done}, but the training data has {plan.samples}"
            )

    def stopped_by(self, config: Config, plan: Plan) -> str | None:
        """What has ended the run: "epochs", "updates", "patience" or "hours"; None if it goes on. The last two end it
        at epochs' ends only."""
        if plan.is_end(self.epoch, self.epoch_samples) and self.is_evaluated:
            return "updates" if plan.updates == config.stop.updates else "epochs"
        if self.epoch_samples or self.epoch == 0:
            return None
        patience = config.stop.patience_epochs
        evaluated = self.epoch % config.eval_every_epochs == 0
        if (
            patience is not None
            and evaluated
            and self.best_epoch is not None
            and self.epoch - self.best_epoch >= patience
        ):
            return "patience"
        return "hours" if self.out_of_time(config) else None

    @property
    def is_evaluated(self) -> bool:
        """Whether what follows update `update` is done: an evaluation, if one was due, and the end of an epoch."""
        return self.epoch_samples == 0 or self.evaluated == self.update

    def evaluation_is_pending(self, config: Config) -> bool:
        """Whether --eval-every-updates asks for an evaluation now, within an epoch, which is not done yet."""
        every = config.eval_every_updates
        return every is not None and self.update % every == 0 and not self.is_evaluated

    def current_epoch(self, config: Config, plan: Plan) -> int:
        """The current epoch, counted from 1; after the end of the last epoch still that one."""
        return self.epoch + (self.epoch_samples > 0 or self.stopped_by(config, plan) is None)

    def out_of_time(self, config: Config) -> bool:
        """Whether the hours of --stop.hours are over."""
        return config.stop.hours is not None and self.wall_seconds >= config.stop.hours * 3600

    def record_best(self, value: float, epoch: int, *, lower: bool) -> bool:
        """Take the value of the best metric after `epoch` epochs; return whether it is the best one so far.

        `lower`: whether lower values are better. One that is not finite is never the best.
        """
        best = self.best_value
        is_best = math.isfinite(value) and (best is None or (value < best if lower else value > best))
        if is_best:
            self.best_value, self.best_update, self.best_epoch = value, self.update, epoch
        elif self.best_epoch is None:
            self.best_epoch = epoch  # nothing is finite yet: the patience begins here
        return is_best

    def forget_best(self) -> None:
        """Begin anew, by another metric."""
        self.best_value = self.best_update = self.best_epoch = None

    def begin_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch and reset the counts of an epoch."""
        self.epoch, self.epoch_samples, self.epoch_left_out, self.evaluated = epoch, 0, 0, None
        self.epoch_loss_sum, self.epoch_correct, self.epoch_count, self.epoch_sums = 0.0, 0, 0, {}

    def add_metrics(self, totals: Mapping[str, float], samples: int) -> None:
        """Count the sums of the training's metrics over `samples` more samples of the epoch."""
        others = dict(totals)
        self.epoch_loss_sum += others.pop("loss")
        self.epoch_correct += int(others.pop("accuracy", 0))  # data with several labels an image has none
        # A metric that was not counted from the epoch's first sample on (the run began without it) waits for the next.
        counted = [name for name in others if name in self.epoch_sums or self.epoch_count == 0]
        self.epoch_sums = {name: self.epoch_sums.get(name, 0) + others[name] for name in counted}
        self.epoch_count += samples

    @property
    def epoch_metrics(self) -> dict[str, float]:
        """The mean of each metric over the epoch's samples so far."""
        totals = {"loss": self.epoch_loss_sum, "accuracy": self.epoch_correct, **self.epoch_sums}
        return {name: total / self.epoch_count if self.epoch_count else math.nan for name, total in totals.items()}

    def to_saved(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return asdict(self)

    @classmethod
    def from_saved(cls, saved: dict[str, Any], path: Path) -> TrainState:
        """Read what `to_saved` wrote into the checkpoint `path`. Raises UserError for entries that are unknown or
        missing, and for values that are impossible."""
        others = sorted(saved.keys() ^ {entry.name for entry in fields(cls)})
        state = cls() if others else cls(**saved)
        if name := others[0] if others else state._impossible():
            raise UserError(
                f"{path / 'state.json'}: {name} is {str(saved.get(name, 'missing'))[:40]!r}, which no run can have "
                f"counted. If you do not trust it, delete {path}; the previous checkpoint is used then."
            )
        if path.name.startswith("update-") and path.name != f"update-{state.update:08d}":
            raise UserError(
                f"{path} holds the checkpoint of update {state.update}: rename it to update-{state.update:08d}."
            )
        return state

    def _impossible(self) -> str:
        """The name of an entry that has a wrong type or is out of range; "" if there is none."""
        for entry in fields(self):
            if not FITS[str(entry.type)](getattr(self, entry.name)):
                return entry.name
        return "" if self.epoch <= self.update else "epoch"
