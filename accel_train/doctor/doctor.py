"""`accel-train doctor`: call the checks one after the other."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from accel_train.bench.workload import device_name
from accel_train.config.schema import Config
from accel_train.doctor import data, devices, network, recipe, scheduler, storage, world
from accel_train.doctor.check import FAIL, NOT_CHECKED, Check, Examination, Finding
from accel_train.doctor.rehearsal import signals
from accel_train.doctor.rehearsal.drill import DRILL
from accel_train.errors import LOGGER, nearest, one_line, raise_mistakes
from accel_train.launch.agreement import broadcast_from_main
from accel_train.launch.environment import Launch
from accel_train.training_setup import connect

CHECKS: tuple[Check, ...] = (  # cheap ones first: they explain why a later one fails
    *world.CHECKS,
    *scheduler.RECEIVED,
    *devices.CHECKS,
    *network.CHECKS,
    *data.CHECKS,
    *recipe.CHECKS,
    *storage.CHECKS,
    recipe.FORECAST,
    *scheduler.LIMITS,  # need what was measured
    *signals.CHECKS,  # takes long
)
MOST_LISTED = 64  # ranks


@dataclass(frozen=True)
class Diagnosis:
    """What the checks have found, the same on all processes."""

    findings: Mapping[str, Finding]
    """By the name of the check."""
    seconds: float

    @property
    def failed(self) -> bool:
        return any(finding.status == FAIL for finding in self.findings.values())


def doctor(
    launch: Launch,
    config: Config,
    *,
    seconds: float = 60.0,
    quick: bool = False,
    skip: Collection[str] = (),
    drill: bool = False,
) -> Diagnosis:
    """Examine the machines, the launcher and the recipe. Collective: every process calls it.

    `seconds`: checks that have no time left are n/a. `skip`: names of checks to leave out. `drill`: also kill and
    continue a training, however long that takes. Raises UserError if the examination cannot begin.
    """
    began = time.monotonic()
    names = [check.name for check in CHECKS]
    raise_mistakes(f"--skip: no check is named {name!r}.{nearest(name, names)}" for name in skip if name not in names)
    network.listen_to_nccl()
    accelerator = connect(config, launch)
    exam = Examination(config, launch, accelerator, _existing_folder(config), quick, began + seconds)
    if launch.world_size <= MOST_LISTED:
        ranks = exam.gather(f"{accelerator.device} ({device_name(accelerator.device)})")
        if accelerator.is_main_process:
            for rank, device in enumerate(ranks):
                LOGGER.info(f"rank {rank}: {exam.hosts[rank]}  {device}")
    found: dict[str, Finding] = {}
    for check in (*CHECKS, *([DRILL] if drill else [])):
        if check.name in skip or (quick and not check.quick):
            continue
        found[check.name] = _look(exam, check)
    return Diagnosis(found, time.monotonic() - began)


def _look(exam: Examination, check: Check) -> Finding:
    """Call a check on all ranks, if there is time for it."""
    needed = min(check.seconds, 1.0) if exam.quick else check.seconds
    if not broadcast_from_main(exam.accelerator, lambda: needed == 0 or exam.seconds_left >= needed):
        return Finding(NOT_CHECKED, "not enough time", f"about {needed:.0f} s", "Give more: --seconds 300")
    try:
        return check.look(exam)
    except RuntimeError as error:  # a collective that failed has failed on every rank
        return Finding(FAIL, one_line(str(error)), "no error", "Look at the messages of the other ranks.")


def _existing_folder(config: Config) -> Path:
    """The folder to which the run will be written, or the nearest one above it that exists."""
    wanted = Path(config.output_dir or Path("runs")).absolute()
    return next(folder for folder in (wanted, *wanted.parents) if folder.is_dir())
