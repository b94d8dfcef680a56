"""A check of the doctor, what it finds, and what all checks know.

All processes call a check together, in the same order, so a check may use collectives. What each process looks at alone
goes through `worst_rank` or `on_each_rank`: an error of one process must not leave the others waiting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from accel_train.config.schema import Config
from accel_train.data.sources.load import Splits
from accel_train.errors import one_line
from accel_train.launch.agreement import broadcast_from_main
from accel_train.launch.environment import Launch
from accel_train.launch.process import hostname
from accel_train.tools.bench import Workload
from accel_train.training_setup import TrainingSetup

STATUSES = NA, PASS, WARN, FAIL = "n/a", "PASS", "WARN", "FAIL"  # from the harmless to the serious


@dataclass(frozen=True)
class Finding:
    """What a check has found."""

    status: str
    """PASS, WARN, FAIL, or n/a for what cannot be checked on this machine."""
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
    """The folder of the run, or the nearest one above it that exists."""
    hosts: list[str] = field(init=False)
    """The host of each rank."""
    measured: dict[str, float] = field(default_factory=dict)
    """What later checks use, equal on all ranks: "update_seconds", "save_seconds" and "training_seconds"."""
    splits: Splits | None = None
    """The data, if it could be loaded."""
    setup: TrainingSetup | None = None
    """Model, optimizer and input, if they could be created."""
    workload: Workload | None = None
    """Measures updates, if one fits. A training measures its own."""

    def __post_init__(self) -> None:
        self.hosts = self.gather(hostname())

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of each rank, on every rank. Collective."""
        return list(gather_object([value]))

    @property
    def ranks_here(self) -> int:
        """The number of ranks on this host."""
        return self.hosts.count(self.hosts[self.launch.rank])

    def names(self, ranks: Sequence[int]) -> str:
        """Return "rank 3 (node7), rank 4 (node8)" for a message; "every rank" if it is all of several."""
        if len(ranks) == len(self.hosts):
            return "every rank" if len(ranks) > 1 else self.hosts[0]
        shown = ", ".join(f"rank {rank} ({self.hosts[rank]})" for rank in ranks[:4])
        return shown if len(ranks) <= 4 else f"{shown} and {len(ranks) - 4} more"


Check = Callable[[Examination], Finding]


def _alone(look: Callable[[], Finding]) -> Finding:
    """Call a function that is not collective. An error of one process, or a mistake in it, must not end a training."""
    try:
        return look()
    except Exception as error:
        return Finding(NA, f"could not be checked: {one_line(error, 200)}")


def worst_rank(exam: Examination, look: Callable[[], Finding]) -> Finding:
    """Call `look`, which is not collective, on every rank; return the most serious finding, with its ranks. Collective.

    An error of a rank becomes its finding, n/a.
    """
    findings: list[Finding] = exam.gather(_alone(look))
    worst = max(findings, key=lambda finding: STATUSES.index(finding.status))
    if worst.status == PASS:  # what one rank could not see is no PASS
        worst = next((finding for finding in findings if finding.status == NA), worst)
    ranks = [rank for rank, finding in enumerate(findings) if finding.status == worst.status]
    if len(ranks) == len(findings):
        return worst
    return Finding(worst.status, f"{exam.names(ranks)}: {worst.measured}", worst.expected, worst.advice)


def on_each_rank(look: Check) -> Check:
    """Turn a function that each rank calls alone into a check: see `worst_rank`."""
    return functools.wraps(look)(lambda exam: worst_rank(exam, lambda: look(exam)))


def on_main(look: Check) -> Check:
    """Turn a function into a check that the main process makes for all ranks."""
    return functools.wraps(look)(lambda exam: broadcast_from_main(exam.accelerator, lambda: _alone(lambda: look(exam))))
