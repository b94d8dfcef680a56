"""`accel-train doctor`: call the checks one after the other, print a table of what they find, and judge."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from accel_train.bench.machine import device_name
from accel_train.config.schema import Config
from accel_train.doctor import data, devices, forecast, network, recipe, scheduler, storage, world
from accel_train.doctor.check import FAIL, NOT_CHECKED, STATUSES, WARN, Check, Examination, Finding
from accel_train.doctor.rehearsal import signals
from accel_train.doctor.rehearsal.drill import DRILL
from accel_train.errors import UserError, nearest, one_line, print_line, writing
from accel_train.files import atomic_write
from accel_train.launch.agreement import broadcast_from_main
from accel_train.launch.environment import Launch
from accel_train.records.table import print_table
from accel_train.training_setup import connect

CHECKS: tuple[Check, ...] = (  # cheap ones first: they explain why a later one fails
    *world.CHECKS,
    *scheduler.RECEIVED,
    *devices.CHECKS,
    *network.CHECKS,
    *data.CHECKS,
    *recipe.CHECKS,
    *storage.CHECKS,
    *forecast.CHECKS,
    *scheduler.LIMITS,  # need what was measured
    *signals.CHECKS,  # takes long
)
MOST_LISTED = 64  # ranks


def doctor(
    config: Config,
    launch: Launch,
    *,
    seconds: float = 60.0,
    quick: bool = False,
    skip: Collection[str] = (),
    with_drill: bool = False,
    json_file: Path | None = None,
) -> int:
    """Examine the machines, the launcher and the recipe; print a table. Collective: every process calls it.

    `seconds`: checks that have no time left are n/a. `skip`: names of checks to leave out. `with_drill`: also kill and
    continue a training, however long that takes. `json_file`: also written.
    Returns the exit code: 0, or 1 if a check fails. Raises UserError if the examination cannot begin.
    """
    began = time.monotonic()
    check_names(skip)
    network.listen_to_nccl()
    accelerator = connect(config, launch)
    exam = Examination(config, launch, accelerator, _existing_folder(config), quick, began + seconds)
    if launch.world_size <= MOST_LISTED:
        ranks = exam.gather(f"{accelerator.device} ({device_name(accelerator.device)})")
        if accelerator.is_main_process:
            for rank, device in enumerate(ranks):
                print_line(f"rank {rank}: {exam.hosts[rank]}  {device}")
    found: dict[str, Finding] = {}
    for check in (*CHECKS, *([DRILL] if with_drill else [])):
        if check.name in skip or (quick and not check.quick):
            continue
        found[check.name] = _look(exam, check)
    if accelerator.is_main_process:
        _print(found, time.monotonic() - began)
    if json_file is not None:
        file = json_file
        broadcast_from_main(accelerator, lambda: _write(file, found))
    return 1 if any(finding.status == FAIL for finding in found.values()) else 0


def check_names(skip: Collection[str]) -> None:
    """Raise UserError if `skip` names a check that does not exist."""
    names = [check.name for check in CHECKS]
    mistakes = [f"--skip: no check is named {name!r}.{nearest(name, names)}" for name in skip if name not in names]
    if mistakes:
        raise UserError(*mistakes)


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


def _print(found: dict[str, Finding], seconds: float) -> None:
    rows = [[finding.status, name, finding.measured, finding.expected] for name, finding in found.items()]
    print_table(("status", "check", "measured", "expected"), rows)
    for name, finding in found.items():
        if finding.advice and finding.status in (WARN, FAIL):
            print_line(f"{finding.status} {name}: {finding.advice}")
    counts = {status: sum(each.status == status for each in found.values()) for status in reversed(STATUSES)}
    counted = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    print_line(f"{counted} in {seconds:.0f} s")


def _write(file: Path, found: dict[str, Finding]) -> Path:
    checks = [{"name": name, **asdict(finding)} for name, finding in found.items()]
    with writing("--json", file):
        atomic_write(file, json.dumps({"checks": checks}, indent=2) + "\n")
    return file
