"""What happens in a training, as the loop says it. docs/architecture.md says who is told, and in which order.

All values are the host's, and of all processes together: what needs the device or the other processes is read before an
event is made. Epochs count from 1.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Event:
    """What all events have."""

    time: float = field(default_factory=lambda: round(time.time(), 3))
    """In seconds since 1970."""


@dataclass(frozen=True)
class Said(Event):
    """Lines for the user, which no file has."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Warned(Event):
    """A warning, which is an event line of metrics.jsonl, too."""

    text: str


@dataclass(frozen=True)
class Noted(Event):
    """An event line of metrics.jsonl, which the user is not shown."""

    text: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Started(Event):
    """Training begins, or goes on after `update`."""

    update: int
    updates: int
    """Of the whole run."""
    epoch: int
    evaluated: bool
    """Whether the evaluation after `update` is done, if there was one to do."""
    skipped_updates: int
    """Those that were not finite, in earlier starts."""
    resumed: bool
    trained: bool
    """All epochs are done, and only the test is left."""
    checkpoint: int | None
    """The update of the newest complete checkpoint."""
    directory: Path
    """Of the run."""


@dataclass(frozen=True)
class UpdateDone(Event):
    """An update is done, or skipped."""

    update: int
    epoch: int
    waiting: float
    """Seconds that training has waited for data in this start."""
    eta_seconds: float | None
    line_due: bool
    """Whether `Logged` follows, unless the run goes back to a checkpoint."""
    figures: ClassVar[None] = None


@dataclass(frozen=True)
class Logged(Event):
    """The figures of the updates since the last such event: of the metrics, "lr" (of the last update),
    "images_per_second" and "data_wait_fraction"."""

    update: int
    epoch: int
    seconds: float
    figures: Mapping[str, float]
    eta_seconds: float | None


@dataclass(frozen=True)
class Evaluated(Event):
    """A split was evaluated; of "train" these are the figures that were counted while the weights changed.

    At an epoch's end "train" comes first, then "val" and "val (ema)", if they are due."""

    name: str
    """The split, such as "val", or "val (ema)" if the EMA was evaluated."""
    update: int
    epoch: int
    figures: Mapping[str, float]
    count: int
    """Samples of the split."""
    seconds: float
    """Since the evaluation before."""

    @property
    def split(self) -> str:
        return self.name.removesuffix(" (ema)")

    @property
    def weights(self) -> str:
        """ "model" or "ema"."""
        return "ema" if self.name.endswith(" (ema)") else "model"


@dataclass(frozen=True)
class SaveBegun(Event):
    """The copy of a checkpoint in host memory is complete, and goes to the disk in the background."""

    update: int
    epoch: int
    stalled_seconds: float
    """For which training stood still."""
    seconds: float
    """The duration of the last complete save: of this one only if the run has waited for it."""
    failures: int
    """Saves that have failed in this start."""


@dataclass(frozen=True)
class SaveCommitted(Event):
    """A checkpoint is complete on the disk."""

    update: int
    path: Path


@dataclass(frozen=True)
class Skipped(Event):
    """An update was not finite and is skipped: at once ("skip"), or after going back to a checkpoint ("rewind")."""

    update: int
    reason: str
    action: str
    skipped_updates: int


@dataclass(frozen=True)
class Rewound(Event):
    """The run has gone back to the checkpoint of `update`."""

    update: int
    evaluated: bool
    """As in `Started`."""


@dataclass(frozen=True)
class Ended(Event):
    """The training has ended: finished, interrupted or failed. What it leaves is on the disk as far as it could be."""

    update: int
    state: str
    """ "finished", "interrupted" or "failed"."""
    title: str
    shown: Mapping[str, str]
    """What the last screen shows, by name."""
    commands: Mapping[str, str]
    """What to do next, by name."""
    status: Mapping[str, Any] = field(default_factory=dict)
    """More values of status.json."""
    result: Mapping[str, Any] | None = None
    """The content of result.json, of a run that is trained to its end."""
    stopped_by: str | None = None
    """What ended or interrupted it: "epochs", "patience", "hours", "SIGTERM", …"""


@dataclass(frozen=True)
class Closed(Event):
    """The process leaves the run, after its end or with an error: nothing follows."""
