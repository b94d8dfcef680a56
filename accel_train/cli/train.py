"""`accel-train train`, and `doctor`, whose checks a training starts with."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from accel_train.cli.common import importing, print_table
from accel_train.config.checks import check_root
from accel_train.config.declaration import RECIPE_WORD
from accel_train.config.options import CommandOptions, parse_command_of_recipe
from accel_train.config.schema import to_yaml
from accel_train.errors import UnsavedError, UserError, nearest, print_line
from accel_train.launch.environment import INTERRUPTED, at_terminal, prepare_environment
from accel_train.launch.process import CODE, is_first_process, start_folder, tell_job_script
from accel_train.launch.stopping import record_stop_signal, recorded, stop_signals

if TYPE_CHECKING:
    from accel_train.tools.doctor.check import Finding
    from accel_train.tools.doctor.doctor import Diagnosis, StartDoctor


def train(arguments: Sequence[str]) -> int:
    """Run `accel-train train`; return the exit code."""
    # From here on a warning is recorded, even one that is ignored, as SIGUSR1 is under the job scripts.
    before = {number: signal.signal(number, record_stop_signal) for number in stop_signals()}
    code = 1
    try:
        code = _train(arguments)
        return code
    except UserError as error:
        code = error.code
        raise
    finally:
        if code or is_first_process():  # launchers turn each code into 1
            tell_job_script(CODE, code)
        for number, handler in before.items():
            signal.signal(number, handler)
        recorded.clear()


def _train(arguments: Sequence[str]) -> int:
    from accel_train.config.options import parse

    start = start_folder()
    job = "" if start is None else start.parent.name
    if arguments and arguments[0].endswith(".jsonl"):
        from accel_train.tools.cluster.submission import words_of_element

        arguments = [*words_of_element(Path(arguments[0]), job), *arguments[1:]]
    config = parse(arguments)
    if job and config.output_dir is None:  # a job that is started again finds its run
        config = dataclasses.replace(config, output_dir=Path("runs", config.recipe, f"job-{job}"))
    # Before torch is imported, because torch reads some of these variables.
    launch = prepare_environment(bitwise=config.bitwise)
    if config.config_only:
        if launch.rank == 0:
            for line in to_yaml(config).splitlines():
                print_line(line)
        return 0
    finished = config.output_dir is not None and (config.output_dir / "result.json").exists()  # needs no data
    if not finished and launch.world_size == launch.local_world_size:
        # Processes of several nodes must agree that it is missing: they look for it after they have met.
        check_root(config.data)
    with importing(config.recipe):
        from accel_train.launch.agreement import end_world
        from accel_train.train import train

    stopped_by: str | None = None
    code = 0
    try:
        result = train(config, launch, preflight=preflight_of_start(launch.rank))
        stopped_by, code = result.stopped_by, int(result.failed_writes > 0)
        if result.nothing_left and launch.rank == 0:
            file = result.directory / "result.json"
            print_line(f"{result.directory} holds a finished run: {file}. Nothing is left to do.")
    except UnsavedError as error:  # the run's console has said why
        stopped_by, code = error.stopped_by, 1
    end_world()
    return INTERRUPTED if stopped_by == "SIGINT" and at_terminal() else code


VARIABLE, MODES = "DOCTOR", ("print", "strict", "off")
"""Set by job scripts: whether the start of a training prints what the doctor finds, and ends if a check fails."""


@dataclass(frozen=True)
class Doctor(CommandOptions):
    """Check nodes, data and job limits before a long run.

    Start it the way you start the training, with the same options: accelerate launch … -m accel_train doctor RECIPE.
    Each check reports PASS, WARN, FAIL or n/a, the measured and the expected value. If one fails, the exit code is 1.
    """

    TRAIN_OPTIONS = ("",)

    recipe: Annotated[str, RECIPE_WORD] = "digits"
    """A recipe, as for train."""


def doctor(arguments: Sequence[str]) -> int:
    """Run `accel-train doctor`; return the exit code."""
    _, config = parse_command_of_recipe(Doctor, arguments)
    launch = prepare_environment()
    with importing(config.recipe):
        from accel_train.launch.agreement import end_world
        from accel_train.tools.doctor.doctor import doctor

    diagnosis = doctor(launch, config)
    end_world()
    if launch.rank == 0:
        found = diagnosis.findings
        rows = [[finding.status, name, finding.measured, finding.expected] for name, finding in found.items()]
        print_table(("status", "check", "measured", "expected"), rows)
        for name, finding in found.items():
            if finding.status in ("WARN", "FAIL"):
                print_line(f"{finding.status} {name}: {finding.advice}")
        print_line(_summary(found, diagnosis.seconds))
    return int(bool(diagnosis.failed))


def _summary(findings: Mapping[str, Finding], seconds: float) -> str:
    statuses = [finding.status for finding in findings.values()]
    counts = [f"{statuses.count(status)} {status}" for status in ("FAIL", "WARN", "PASS", "n/a") if status in statuses]
    return f"{', '.join(counts)} in {seconds:.1f} s"


def preflight_of_start(rank: int) -> StartDoctor | None:
    """Return what checks the start of a training, as the variable DOCTOR says; None without it.

    `rank`: of this process. The first one prints.
    """
    mode = os.environ.get(VARIABLE, "off")
    if mode not in MODES:  # a job that has waited for days must not end by this
        if rank == 0:
            hint = nearest(mode, MODES)
            print_line(f"warning: {VARIABLE} is {mode!r}; expected {', '.join(MODES)}.{hint} It counts as print.")
        mode = "print"
    if mode == "off":
        return None
    from accel_train.tools.doctor.doctor import StartDoctor

    seen: dict[str, Finding] = {}

    def report(diagnosis: Diagnosis, is_last: bool) -> None:
        seen.update(diagnosis.findings)
        if rank == 0:
            for name, finding in diagnosis.findings.items():
                if finding.status in ("WARN", "FAIL"):
                    print_line(
                        f"{finding.status} {name}: {finding.measured}; expected {finding.expected}. {finding.advice}"
                    )
            if is_last or (diagnosis.failed and mode == "strict"):
                print_line(f"accel-train doctor: {_summary(seen, diagnosis.seconds)}")
        if diagnosis.failed and mode == "strict":
            failed = ", ".join(diagnosis.failed)
            raise UserError(
                f"{VARIABLE}=strict, and these checks failed: {failed} (see above). The training was not started."
            )

    return StartDoctor(report)
