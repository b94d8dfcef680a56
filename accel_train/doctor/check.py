"""A check of the doctor, what it finds, and what all checks know.

All processes call a check together, in the same order, so a check may use collectives. What each process looks at alone
goes through `worst_rank` or `on_each_rank`: an error of one process must not leave the others waiting.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from accel_train.bench.workload import Workload
from accel_train.config.schema import Config
from accel_train.data.sources.load import Splits
from accel_train.errors import UserError, one_line
from accel_train.launch.agreement import broadcast_from_main
from accel_train.launch.environment import Launch
from accel_train.launch.process import hostname

PASS, WARN, FAIL, NOT_CHECKED = "PASS", "WARN", "FAIL", "n/a"
STATUSES = (NOT_CHECKED, PASS, WARN, FAIL)  # from the harmless to the serious


@dataclass(frozen=True)
class Finding:
    """What a check has found."""

    status: str
    """PASS, WARN, FAIL, or n/a for what cannot be looked at on this machine."""
    measured: str
    """What was measured, with its unit, and where: the host and the rank."""
    expected: str = ""
    """What was expected, and why."""
    advice: str = ""
    """What to do, if possible the line to type; "" for PASS."""


def judged(good: bool, measured: str, expected: str, advice: str, *, otherwise: str = WARN) -> Finding:
    """PASS if what was measured is `good`, else `otherwise` with the advice."""
    return Finding(PASS, measured, expected) if good else Finding(otherwise, measured, expected, advice)


@dataclass
class Examination:
    """What all checks know: the run that is about to begin, its processes, and what earlier checks have measured."""

    config: Config
    launch: Launch
    accelerator: Accelerator
    folder: Path
    """An existing folder on the file system to which the run will be written."""
    quick: bool
    """Measure for tenths of a second instead of seconds."""
    ends: float
    """When the examination should be over, of `time.monotonic`."""
    hosts: list[str] = field(init=False)
    """The host of each rank."""
    measured: dict[str, float] = field(default_factory=dict)
    """What later checks use, equal on all ranks: "update_seconds", "save_seconds", "checkpoint_bytes" and so on."""
    splits: Splits | None = None
    """The data, if it could be loaded."""
    workload: Workload | None = None
    """Model, optimizer and input, if an update fits."""

    def __post_init__(self) -> None:
        self.hosts = self.gather(hostname())

    @property
    def seconds_left(self) -> float:
        """Seconds until the examination should be over. Processes differ: let the main process decide by it."""
        return self.ends - time.monotonic()

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of each rank, on every rank. Collective."""
        return list(gather_object([value]))

    def slowest(self, seconds: float) -> float:
        """The longest time of all ranks. Collective."""
        return float(max(self.gather(seconds)))

    def agreed(self, number: int) -> int:
        """The main process's number: how often all ranks do something together. Collective."""
        return broadcast_from_main(self.accelerator, lambda: number)

    def names(self, ranks: Sequence[int]) -> str:
        """Return "rank 3 (node7), rank 4 (node8)" for a message; "every rank" if it is all of several."""
        if len(ranks) == len(self.hosts):
            return "every rank" if len(ranks) > 1 else self.hosts[0]
        shown = ", ".join(f"rank {rank} ({self.hosts[rank]})" for rank in ranks[:4])
        return shown if len(ranks) <= 4 else f"{shown} and {len(ranks) - 4} more"


Look = Callable[[Examination], Finding]


@dataclass(frozen=True)
class Check:
    """A check: its name in the table and for --skip, and the function that all processes call together."""

    name: str
    look: Look
    quick: bool = False
    """Whether --quick does it."""
    seconds: float = 1.0
    """How long it takes at most on a usual machine: it is left out if less time is left. With --quick: at most 1 s."""


def worst_rank(exam: Examination, look: Callable[[], Finding]) -> Finding:
    """Call `look`, which is not collective, on every rank; return the most serious finding, with its ranks. Collective.

    The errors OSError, RuntimeError and UserError of a rank become its finding, n/a.
    """
    try:
        finding = look()
    except (OSError, RuntimeError, UserError) as error:
        finding = Finding(NOT_CHECKED, f"could not be checked: {one_line(str(error))}")
    found: list[Finding] = exam.gather(finding)
    worst = max(found, key=lambda each: STATUSES.index(each.status))
    if any(each.status == NOT_CHECKED for each in found) and worst.status == PASS:
        worst = next(each for each in found if each.status == NOT_CHECKED)  # what one rank could not see is no PASS
    ranks = [rank for rank, each in enumerate(found) if each.status == worst.status]
    if len(found) == 1 or len(ranks) == len(found):
        return worst
    return Finding(worst.status, f"{exam.names(ranks)}: {worst.measured}", worst.expected, worst.advice)


def on_each_rank(look: Look) -> Look:
    """Turn a function that each rank calls alone into a check: see `worst_rank`."""
    return functools.wraps(look)(lambda exam: worst_rank(exam, lambda: look(exam)))


def on_main(look: Look) -> Look:
    """Turn a function into a check that the main process makes for all ranks."""
    return functools.wraps(look)(lambda exam: broadcast_from_main(exam.accelerator, lambda: look(exam)))
