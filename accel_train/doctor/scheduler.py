"""The scheduler: what the job really received, and how long it may take."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import time
from datetime import datetime
from pathlib import Path

import torch

from accel_train.doctor import memory
from accel_train.doctor.check import FAIL, NOT_CHECKED, PASS, WARN, Check, Examination, Finding, worst_of
from accel_train.launch.consensus import broadcast_from_main
from accel_train.launch.process import available_cores, core_set

SIGNALS = ("USR1", "10", "TERM", "15", "INT", "2")  # after which the training saves
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def cores(exam: Examination) -> Finding:
    """Each process has the cores that the job asked for, and does not share them with another process."""
    asked = os.environ.get("SLURM_CPUS_PER_TASK")
    everyone = exam.gather((exam.hosts[exam.launch.rank], core_set()))
    host, mine = everyone[exam.launch.rank]
    sharing = sum(1 for other, theirs in everyone if other == host and theirs & mine)
    quota = cpu_quota()

    def look() -> Finding:
        share = min(available_cores(), quota or available_cores()) / sharing
        found = f"{share:.3g} for each process ({available_cores()} shared by {sharing})"
        if quota is not None and quota < available_cores():
            found += f", the container's limit is {quota:.3g}"
        if asked is not None and exam.launch.launcher == "Slurm" and available_cores() < int(asked):
            return Finding(FAIL, found, f"{asked} (--cpus-per-task)", "srun --cpus-per-task, or --cpu-bind=none")
        if share < 1:
            return Finding(WARN, found, "at least one", "Start fewer processes, or ask for more cores.")
        return Finding(PASS, found, "at least one" if asked is None else asked)

    return worst_of(exam, look)


def cpu_quota(file: Path = CPU_MAX) -> float | None:
    """The limit of the control group, in cores; None: no limit."""
    try:
        quota, period = file.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def time_left(exam: Examination) -> Finding:
    """The rest of the job's time, against the time that the recipe needs."""
    needed = exam.measured.get("training_seconds")
    return broadcast_from_main(exam.accelerator, lambda: judged_time(job_times()[1], needed))


def judged_time(end: float | None, needed: float | None) -> Finding:
    """Judge the time of the job's end by the seconds that the training needs, None if that was not measured."""
    if end is None:
        return Finding(NOT_CHECKED, "not in a job of Slurm with a time limit")
    left = end - time.time()
    found = f"{left / 3600:.2f} h left"
    if needed is None:
        return Finding(NOT_CHECKED, f"{found}; the recipe's time was not measured")
    expected = f"{needed / 3600:.2f} h for this recipe"
    if left < needed:
        again = int(needed // max(left, 1))
        return Finding(WARN, found, expected, f"It needs {again} requeues: --requeue and --signal (docs/clusters.md).")
    return Finding(PASS, found, expected)


def job_times() -> tuple[float | None, float | None]:
    """When this job of Slurm began and when it will end, in seconds since 1970; None if it is not known."""
    names = ("SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME")
    if all(os.environ.get(name, "").isdigit() for name in names):
        return float(os.environ[names[0]]), float(os.environ[names[1]])
    record = _job_record(os.environ["SLURM_JOB_ID"]) if "SLURM_JOB_ID" in os.environ else ""
    times: list[float | None] = []
    for name in ("StartTime", "EndTime"):
        match = re.search(rf"\b{name}=(\S+)", record)
        try:
            times.append(datetime.fromisoformat(match[1]).timestamp() if match else None)  # local time
        except ValueError:  # "Unknown"
            times.append(None)
    return times[0], times[1]


def gpus(exam: Examination) -> Finding:
    """The GPUs that the job has are the GPUs that the processes use."""
    given = os.environ.get("SLURM_GPUS_ON_NODE", "")
    device, local = exam.accelerator.device, exam.hosts.count(exam.hosts[exam.launch.rank])

    def look() -> Finding:
        seen = torch.cuda.device_count() if device.type == "cuda" else 0
        allocated = int(given) if given.isdigit() else seen
        expected = f"{allocated} GPU{'s' * (allocated != 1)} of this job on each node"
        if allocated == 0:
            return Finding(NOT_CHECKED, "no GPUs were given", expected)
        if device.type != "cuda":
            advice = (
                "python -c 'import torch; print(torch.cuda.is_available())'; nvidia-smi; is it PyTorch for the CPU?"
            )
            return Finding(WARN if os.environ.get("ACCELERATE_USE_CPU") else FAIL, "the CPU is used", expected, advice)
        if local < allocated:
            advice = f"Start {allocated} processes on each node (--num_processes, PROCESSES_PER_NODE)."
            return Finding(WARN, f"{local} of {allocated} GPUs are used", expected, advice)
        return Finding(PASS, f"{local} processes, {seen} GPUs seen by each", expected)

    return worst_of(exam, look)


def requeue(exam: Examination) -> Finding:
    """Slurm may requeue the job."""

    def look() -> Finding:
        if not os.environ.get("SLURM_JOB_ID"):
            return Finding(NOT_CHECKED, "not a job of Slurm")
        allowed = re.search(r"\bRequeue=(\d)", _job_record(os.environ["SLURM_JOB_ID"]))
        if allowed is None:
            return Finding(NOT_CHECKED, "scontrol does not answer here")
        if allowed[1] == "0":
            return Finding(WARN, "not allowed", "allowed", "sbatch --requeue; else continue it by hand")
        return Finding(PASS, "allowed", "allowed")

    return broadcast_from_main(exam.accelerator, look)


def lead(exam: Examination) -> Finding:
    """The signal comes early enough before the time limit: a save takes at most half of that time."""
    return broadcast_from_main(
        exam.accelerator, lambda: judged_lead(signal_option(), exam.measured.get("save_seconds"))
    )


def signal_option() -> str:
    """What --signal was given, "B:USR1@120": of sbatch's variable, else of the batch script; "" if neither says."""
    if "SBATCH_SIGNAL" in os.environ or not os.environ.get("SLURM_JOB_ID"):
        return os.environ.get("SBATCH_SIGNAL", "")
    script = _scontrol("write", "batch_script", os.environ["SLURM_JOB_ID"], "-")
    found = re.findall(r"^#SBATCH.*\s--signal[= ](\S+)", script, re.MULTILINE)
    return found[-1] if found else ""


def judged_lead(given: str, save: float | None) -> Finding:
    """Judge sbatch's --signal by the seconds that a save takes, None if that was not measured."""
    match = re.fullmatch(r"([RB]*:)?(?:SIG)?(\w+)(?:@(\d+))?", given)
    expected = "USR1, at least twice as long before the limit as a save takes"
    if match is None:
        return Finding(NOT_CHECKED, "neither SBATCH_SIGNAL nor the batch script has --signal", expected)
    only, name, seconds = match[1] or "", match[2], int(match[3] or 60)
    again = f"sbatch --signal=USR1@{max(seconds, int((save or 0) * 4) + 1)}"
    if name not in SIGNALS or "B" in only:
        reason = "only the batch script gets it" if "B" in only else "the training does not listen to it"
        return Finding(FAIL, f"--signal={given}: {reason}", expected, again)
    if save is None:
        return Finding(NOT_CHECKED, f"{seconds} s; a save was not measured", expected)
    measured = f"{seconds} s, a save takes {save:.2g} s"
    if save > seconds / 2:
        return Finding(FAIL, measured, expected, again)
    return Finding(PASS, measured, expected)


@functools.cache
def _job_record(job: str) -> str:
    return _scontrol("show", "job", "--oneliner", job)


def _scontrol(*words: str) -> str:
    try:
        return subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


RECEIVED = (Check("cores", cores, quick=True), *memory.CHECKS, Check("gpus", gpus, quick=True))
LIMITS = (
    Check("time-left", time_left, quick=True),
    Check("requeue", requeue, quick=True),
    Check("signal-lead", lead, quick=True),
)
