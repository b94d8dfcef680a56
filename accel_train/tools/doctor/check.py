"""A check of the doctor, what it finds, and what all checks know.

All processes call a check together, in the same order, so a check may use collectives. What each process looks at alone
goes through `on_each_rank` or `on_main`: an error of one process must not leave the others waiting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from accel_train.config.schema import Config
from accel_train.data.sources.load import Splits
from accel_train.errors import UserError, first_of, one_line
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


def failure(error: UserError | RuntimeError) -> Finding:
    """FAIL: the training would end with this error, too."""
    return Finding(FAIL, one_line(error), "no error", "Do what this message says, or look at those of the other ranks.")


def worst(*findings: Finding) -> Finding:
    """The most serious finding, the first of equals."""
    return max(findings, key=lambda finding: STATUSES.index(finding.status))


@dataclass
class Examination:
    """What all checks know: the run that is about to begin, its processes, and what earlier checks have measured."""

    config: Config
    launch: Launch
    accelerator: Accelerator
    folder: Path = field(init=False)
    """The folder of the run, or the nearest one above it that exists."""
    hosts: list[str] = field(init=False)
    """The host of each rank."""
    measured: dict[str, float] = field(default_factory=dict)
    """What later checks use: "update_seconds" and "training_seconds", equal on all ranks; "save_seconds" on rank 0."""
    splits: Splits | None = None
    """The data, if it could be loaded."""
    setup: TrainingSetup | None = None
    """Model, optimizer and input, if they could be created."""
    workload: Workload | None = None
    """Measures updates, if one fits. A training measures its own."""

    def __post_init__(self) -> None:
        wanted = Path(self.config.output_dir or Path("runs")).absolute()
        self.folder = next(folder for folder in (wanted, *wanted.parents) if folder.is_dir())
        self.hosts = self.gather(hostname())

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of each rank, on every rank. Collective."""
        return list(gather_object([value]))

    def names(self, ranks: Sequence[int]) -> str:
        """Return "rank 3 (node7), rank 4 (node8)" for a message; "every rank" if it is all of several."""
        if len(ranks) == len(self.hosts):
            return "every rank" if len(ranks) > 1 else self.hosts[0]
        return first_of([f"rank {rank} ({self.hosts[rank]})" for rank in ranks], 4)


def same(exam: Examination, facts: Mapping[str, str], advice: str) -> Finding:
    """FAIL if a fact differs between ranks, or is missing on some. Collective."""
    everyone: list[Mapping[str, str]] = exam.gather(facts)
    differences = []
    for name in sorted({name for theirs in everyone for name in theirs}):
        values = [theirs.get(name, "not set") for theirs in everyone]
        if others := [rank for rank, value in enumerate(values) if value != values[0]]:
            differences.append(f"{name} is {values[others[0]]} on {exam.names(others)}, {values[0]} on rank 0")
    measured = first_of(differences) if differences else f"{len(facts)} are equal"
    return judged(not differences, measured, "the same on all ranks", advice, otherwise=FAIL)


Check = Callable[[Examination], Finding]


def _alone(look: Callable[[], Finding]) -> Finding:
    """Call a function that is not collective. An error of one process, or a mistake in it, must not end a training."""
    try:
        return look()
    except UserError as error:
        return failure(error)
    except Exception as error:
        return Finding(NA, f"could not be checked: {one_line(error, 200)}")


def on_each_rank(look: Check) -> Check:
    """Turn a function that each rank calls alone into a check: the most serious finding, with its ranks.

    A UserError of a rank becomes its finding, FAIL; another error n/a.
    """

    @functools.wraps(look)
    def check(exam: Examination) -> Finding:
        findings: list[Finding] = exam.gather(_alone(lambda: look(exam)))
        found = worst(*findings)
        if found.status == PASS:  # what one rank could not see is no PASS
            found = next((finding for finding in findings if finding.status == NA), found)
        ranks = [rank for rank, finding in enumerate(findings) if finding.status == found.status]
        if len(ranks) == len(findings):
            return found
        return Finding(found.status, f"{exam.names(ranks)}: {found.measured}", found.expected, found.advice)

    return check


def on_main(look: Check) -> Check:
    """Turn a function into a check that the main process makes for all ranks."""
    return functools.wraps(look)(lambda exam: broadcast_from_main(exam.accelerator, lambda: _alone(lambda: look(exam))))
