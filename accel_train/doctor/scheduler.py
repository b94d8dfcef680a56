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
from accel_train.doctor.check import (
    FAIL,
    NOT_CHECKED,
    PASS,
    WARN,
    Check,
    Examination,
    Finding,
    judged,
    on_each_rank,
    on_main,
    worst_rank,
)
from accel_train.errors import counted
from accel_train.launch.process import available_cores, core_set
from accel_train.untrusted import is_number, read_json_object

SIGNALS = ("USR1", "10", "TERM", "15", "INT", "2")  # after which the training saves
PASSED_ON, JOB_SCRIPT = ("USR1", "10"), "ACCEL_TRAIN_START"
"""What the job scripts pass on to the training if only they get it (--signal=B:…), and a variable that they set."""
PREFLIGHT = "ACCEL_TRAIN_PREFLIGHT"
"""Set by slurm/preflight.sbatch: the job's limits are not those of the training."""
PBS_TIMES, PBS_LEAD = "ACCEL_TRAIN_JOB_TIMES", "ACCEL_TRAIN_LEAD_SECONDS"
"""Set by pbs/train.pbs: when its job began and ends, "1767323045 1767337445", and how long before the end it saves."""
EARLY = "at least twice as long before the limit as a save takes"
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
        if asked is not None and exam.launch.launcher == "srun" and available_cores() < int(asked):
            return Finding(FAIL, found, f"{asked} (--cpus-per-task)", "srun --cpus-per-task, or --cpu-bind=none")
        wanted = asked if asked is not None and share >= 1 else "at least one"
        return judged(share >= 1, found, wanted, "Start fewer processes, or ask for more cores.")

    return worst_rank(exam, look)


def cpu_quota(file: Path = CPU_MAX) -> float | None:
    """The limit of the control group, in cores; None: no limit."""
    try:
        quota, period = file.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


@on_main
def time_left(exam: Examination) -> Finding:
    """The rest of the job's time, against the time that the recipe needs."""
    return judged_time(job_times()[1], exam.measured.get("training_seconds") or _rest_of_run(exam))


def _rest_of_run(exam: Examination) -> float | None:
    """The seconds that the run has left, as its last start has written; None if this is its first start."""
    if exam.config.output_dir is None:
        return None
    rest = read_json_object(exam.config.output_dir / "status.json").get("eta_seconds")
    return float(rest) if is_number(rest) and rest else None


def judged_time(end: float | None, needed: float | None) -> Finding:
    """Judge the time of the job's end by the seconds that the training needs, None if that was not measured."""
    if PREFLIGHT in os.environ:
        need = "was not measured" if needed is None else f"is {needed / 3600:.2f} h: give its job that --time"
        return Finding(NOT_CHECKED, f"this job only looks at the nodes; the training's time {need}")
    if end is None:
        return Finding(NOT_CHECKED, "not in a job with a time limit that is known here")
    left = end - time.time()
    found = f"{left / 3600:.2f} h left"
    if needed is None:
        return Finding(NOT_CHECKED, f"{found}; the recipe's time was not measured")
    again = int(needed // max(left, 1))
    advice = f"It needs {again} requeues: --requeue and --signal (docs/clusters.md)."
    return judged(left >= needed, found, f"{needed / 3600:.2f} h for this recipe", advice)


def job_times() -> tuple[float | None, float | None]:
    """When this job began and when it will end, in seconds since 1970; None if it is not known."""
    if re.fullmatch(r"\d+ \d+", given := os.environ.get(PBS_TIMES, "")):
        began, ends = given.split()
        return float(began), float(ends)
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


@on_each_rank
def gpus(exam: Examination) -> Finding:
    """The GPUs that the job has are the GPUs that the processes use."""
    given = os.environ.get("SLURM_GPUS_ON_NODE", "")
    device, local = exam.accelerator.device, exam.hosts.count(exam.hosts[exam.launch.rank])
    seen = torch.cuda.device_count() if device.type == "cuda" else 0
    allocated = int(given) if given.isdigit() else seen
    expected = f"{counted(allocated, 'GPU')} of this job on each node"
    if allocated == 0:
        return Finding(NOT_CHECKED, "no GPUs were given", expected)
    if device.type != "cuda":
        advice = "python -c 'import torch; print(torch.cuda.is_available())'; nvidia-smi; is it PyTorch for the CPU?"
        return Finding(WARN if os.environ.get("ACCELERATE_USE_CPU") else FAIL, "the CPU is used", expected, advice)
    if local < allocated:
        advice = f"Start {allocated} processes on each node (--num_processes, PROCESSES_PER_NODE)."
        return Finding(WARN, f"{local} of {allocated} GPUs are used", expected, advice)
    return Finding(PASS, f"{local} processes, {seen} GPUs seen by each", expected)


@on_main
def requeue(_: Examination) -> Finding:
    """The job may be requeued, or submits itself again."""
    if PBS_LEAD in os.environ:
        return Finding(PASS, "pbs/train.pbs submits itself again", "allowed")
    if not os.environ.get("SLURM_JOB_ID"):
        return Finding(NOT_CHECKED, "not a job of Slurm, nor of pbs/train.pbs")
    allowed = re.search(r"\bRequeue=(\d)", _job_record(os.environ["SLURM_JOB_ID"]))
    if allowed is None:
        return Finding(NOT_CHECKED, "scontrol does not answer here")
    if allowed[1] == "0":
        return Finding(WARN, "not allowed", "allowed", "sbatch --requeue; else continue it by hand")
    return Finding(PASS, "allowed", "allowed")


@on_main
def lead(exam: Examination) -> Finding:
    """The signal comes early enough before the time limit: a save takes at most half of that time."""
    save = exam.measured.get("save_seconds")
    if PREFLIGHT in os.environ:
        need = "was not measured" if save is None else f"takes {save:.2g} s: --signal=USR1@{_enough(save, 60)}"
        return Finding(NOT_CHECKED, f"this job only looks at the nodes; a save of the training {need}")
    if (given := os.environ.get(PBS_LEAD, "")).isdigit():
        again = f"qsub -v TRAIN,LEAD_SECONDS={_enough(save, int(given))}"
        return _judged_seconds(int(given), " (LEAD_SECONDS)", save, again)
    return judged_lead(signal_option(), save)


def _judged_seconds(seconds: int, source: str, save: float | None, again: str) -> Finding:
    """Judge how many seconds before the time limit the training is told to save, if a save takes `save` seconds."""
    if save is None:
        return Finding(NOT_CHECKED, f"{seconds} s{source}; a save was not measured", EARLY)
    measured = f"{seconds} s{source}, a save takes {save:.2g} s"
    return judged(save <= seconds / 2, measured, EARLY, again, otherwise=FAIL)


def _enough(save: float | None, seconds: int) -> int:
    return max(seconds, int((save or 0) * 4) + 1)


def signal_option() -> str:
    """What --signal was given, such as "B:USR1@120"; "" if nothing says it.

    It is asked of sbatch's variable, of its command line, if Slurm keeps accounts, and of the batch script.
    """
    if "SBATCH_SIGNAL" in os.environ or not os.environ.get("SLURM_JOB_ID"):
        return os.environ.get("SBATCH_SIGNAL", "")
    job = os.environ["SLURM_JOB_ID"]
    line = _answer("sacct", "--jobs", job, "--allocations", "--noheader", "--parsable2", "--format=SubmitLine")
    before_script = re.split(r"\s\S+\.(?:sbatch|sh)\b", line)[0]
    if found := re.findall(r"\s--signal[= ](\S+)", before_script):
        return str(found[-1])
    script = _answer("scontrol", "write", "batch_script", job, "-")
    found = re.findall(r"^#SBATCH.*\s--signal[= ](\S+)", script, re.MULTILINE)
    return found[-1] if found else ""


def judged_lead(given: str, save: float | None) -> Finding:
    """Judge sbatch's --signal by the seconds that a save takes, None if that was not measured."""
    match, expected = re.fullmatch(r"([RB]*:)?(?:SIG)?(\w+)(?:@(\d+))?", given), f"USR1, {EARLY}"
    if match is None:
        return Finding(NOT_CHECKED, "neither SBATCH_SIGNAL, sbatch's line nor the batch script has --signal", expected)
    only, name, seconds = match[1] or "", match[2], int(match[3] or 60)
    again = f"sbatch --signal=USR1@{_enough(save, seconds)}"
    lost = "B" in only and not (name in PASSED_ON and JOB_SCRIPT in os.environ)
    if name not in SIGNALS or lost:
        reason = "only the batch script gets it" if lost else "the training does not listen to it"
        return Finding(FAIL, f"--signal={given}: {reason}", expected, again)
    return _judged_seconds(seconds, "", save, again)


@functools.cache
def _job_record(job: str) -> str:
    return _answer("scontrol", "show", "job", "--oneliner", job)


def _answer(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


RECEIVED = (Check("cores", cores, quick=True), *memory.CHECKS, Check("gpus", gpus, quick=True))
LIMITS = (
    Check("time-left", time_left, quick=True),
    Check("requeue", requeue, quick=True),
    Check("signal-lead", lead, quick=True),
)
