"""The job: do all its processes run the same program, and does the scheduler let the training save and go on?"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

from accel_train.errors import UserError, reason_of
from accel_train.launch.environment import in_job
from accel_train.launch.process import launcher_command, parent_process
from accel_train.records.directory import environment
from accel_train.run.start import find_result
from accel_train.tools.cluster.scheduler import ask
from accel_train.tools.doctor import check
from accel_train.tools.doctor.check import FAIL, NA, PASS, WARN, Examination, Finding, judged, on_each_rank, on_main

DRIVER = Path("/proc/driver/nvidia/version")
CLOCK_SECONDS, PROXY_SECONDS = 1.0, 1.0
PROXIES = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
JOB_VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUBLAS_", "ACCELERATE_", "FSDP_")
"""Beginnings of the names of variables that change what is computed, or how the processes connect."""
MAY_DIFFER = re.compile(r"(GLOO|NCCL)_SOCKET_IFNAME|\w+_DEBUG(_\w+)?")
"""Nodes may name the interface that they share differently, and messages change nothing."""
REQUEUES, SAVES = ("USR1", "10"), ("TERM", "15", "INT", "2", "HUP", "1", "XCPU", "24")
"""The signal after which the training saves and its job goes on, and those after which it saves."""
JOB_SCRIPT = "ACCEL_TRAIN_START"
"""Set by the job scripts, which pass on a signal that only they get (--signal=B:USR1@120)."""
PBS_TIMES, PBS_LEAD = "ACCEL_TRAIN_JOB_TIMES", "ACCEL_TRAIN_LEAD_SECONDS"
"""Set by pbs/train.pbs: when its job began and ends, "1767323045 1767337445", and how long before the end it saves."""
DEFAULT_LEAD = 120  # seconds
EARLY = "USR1, at least twice as long before the time limit as a save takes"


def versions(exam: Examination) -> Finding:
    """The same Python, packages, CUDA and driver on all ranks."""
    mine = environment(exam.launch.world_size, [])
    facts = {"python": mine["python"], **mine["packages"], "CUDA": str(mine["cuda"])}
    facts["driver"] = DRIVER.read_text().partition("\n")[0] if DRIVER.exists() else ""
    return check.same(exam, facts, "Activate the same environment on all nodes.")


def variables(exam: Examination) -> Finding:
    """The variables that change what is computed or how processes connect are the same; a proxy answers."""
    mine = {name: value for name, value in os.environ.items() if name.startswith(JOB_VARIABLES)}
    mine = {name: value for name, value in mine.items() if not MAY_DIFFER.fullmatch(name)}
    return check.worst(check.same(exam, mine, "Export it in the job script, before srun."), _proxy(exam))


@on_each_rank
def _proxy(_: Examination) -> Finding:
    for name in PROXIES:
        url = os.environ.get(name, "")
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if not parts.hostname:
            continue
        try:
            socket.create_connection((parts.hostname, parts.port or 80), PROXY_SECONDS).close()
        except OSError as error:
            measured = f"{name} is {parts.hostname}:{parts.port or 80}, which does not answer ({reason_of(error)})"
            advice = f"Unset {name}, or download data and weights on the login node first."
            return Finding(WARN, measured, "a proxy that answers", advice)
    return Finding(PASS, "")


def clocks(exam: Examination) -> Finding:
    """The clocks of the hosts agree: the ownership of a run and the times of its files depend on them."""
    offsets = []
    for _ in range(3):  # a barrier ends on all ranks within milliseconds; the best of three is least disturbed
        exam.accelerator.wait_for_everyone()
        everyone = exam.gather(time.time())
        offsets.append([each - everyone[0] for each in everyone])
    best = min(offsets, key=lambda each: max(map(abs, each)))
    far = max(range(len(best)), key=lambda rank: abs(best[rank]))
    measured, expected = f"{exam.names([far])} is {best[far]:+.2f} s from rank 0", f"within {CLOCK_SECONDS:.0f} s"
    advice = f"Ask the administrators to set the clock of {exam.hosts[far]} (chrony)."
    return judged(abs(best[far]) <= CLOCK_SECONDS, measured, expected, advice)


@on_main
def time_left(exam: Examination) -> Finding:
    """The run is not finished yet, and the job's time is enough for it."""
    run = exam.config.output_dir
    if run is not None and find_result(run, exam.config) is not None:
        advice = "Choose another --output-dir, with --resume to go on from this run's end."
        return Finding(WARN, f"{run} holds a finished run: nothing would be trained", "a run to train", advice)
    end, needed = end_of_job(), exam.measured.get("training_seconds")
    if end is None or needed is None:
        return Finding(NA, "no time limit is known here, or the recipe's time was not measured")
    left = end - time.time()
    advice = f"It needs {int(needed // max(left, 1))} requeues: --requeue and --signal (docs/clusters.md)."
    return judged(left >= needed, f"{left / 3600:.2f} h left", f"{needed / 3600:.2f} h for this recipe", advice)


def end_of_job() -> float | None:
    """When this job will end, in seconds since 1970; None if it is not known."""
    end = os.environ.get(PBS_TIMES, "").partition(" ")[2] or os.environ.get("SLURM_JOB_END_TIME", "")
    return float(end) if end.isdigit() else None


def signal_of_job(exam: Examination) -> Finding:
    """Before the time limit the training gets a signal, early enough for a save, and the job is requeued."""
    setting, path = _signal_setting(exam), _signal_path(exam)
    return path if path.status == FAIL and setting.status in (PASS, NA) else setting  # else no USR1 would come


@on_main
def _signal_setting(exam: Examination) -> Finding:
    save = exam.measured.get("save_seconds")
    if (lead := os.environ.get(PBS_LEAD, "")).isdigit():
        return _judged_lead(int(lead), "LEAD_SECONDS", save, "qsub -v TRAIN,LEAD_SECONDS=")
    if not os.environ.get("SLURM_JOB_ID"):
        return Finding(NA, "not a job of Slurm, nor of pbs/train.pbs")
    finding = judged_signal(signal_option(), save)
    if finding.status == PASS and re.search(r"\bRequeue=0", _job_record()):
        return Finding(WARN, "the job may not be requeued", "--requeue", "sbatch --requeue; else continue it by hand")
    return finding


def judged_signal(option: str, save: float | None) -> Finding:
    """Judge sbatch's --signal by the seconds that a save takes, None if that was not measured."""
    passed_on = JOB_SCRIPT in os.environ
    line = "sbatch --signal=" + ("B:" if passed_on else "") + "USR1@"
    match = re.fullmatch(r"([RB]*:)?(?:SIG)?(\w+)(?:@(\d+))?", option)
    if match is None:
        lost = "no --signal: Slurm ends the job at its time limit, and what came after the last checkpoint is lost"
        return Finding(WARN, lost, EARLY, f"{line}{_enough(save, DEFAULT_LEAD)}")
    name, seconds = match[2].upper(), int(match[3] or 60)
    again = f"{line}{_enough(save, seconds)}"
    if name not in REQUEUES + SAVES:
        return Finding(FAIL, f"--signal={option}: the training does not listen to it", EARLY, again)
    if "B" in (match[1] or "") and not (passed_on and name in REQUEUES):
        return Finding(FAIL, f"--signal={option}: only the batch script gets it", EARLY, again)
    if name in SAVES:
        return Finding(WARN, f"--signal={option}: the training saves, but the job is not requeued", EARLY, again)
    return _judged_lead(seconds, f"--signal={option}", save, line)


def _judged_lead(seconds: int, source: str, save: float | None, line: str) -> Finding:
    if save is None:
        return Finding(NA, f"{source}; a save was not measured", EARLY)
    measured, again = f"{source}; a save takes {save:.2g} s", f"{line}{_enough(save, seconds)}"
    return judged(save <= seconds / 2, measured, EARLY, again, otherwise=FAIL)


def _enough(save: float | None, seconds: int) -> int:
    return max(seconds, int((save or 0) * 4) + 1)


def signal_option() -> str:
    """What --signal was given to this job of Slurm, such as "B:USR1@120"; "" if nothing says it.

    As sbatch has it, its command line counts first, then its variable, then the script. The job's record has the
    command line since Slurm 24.05, and the accounts have it, if Slurm keeps them.
    """
    job = os.environ["SLURM_JOB_ID"]
    line = "".join(re.findall(r"\bSubmitLine=(.*)", _job_record())) or _answer(
        "sacct", "--jobs", job, "--allocations", "--noheader", "--parsable2", "--format=SubmitLine"
    )
    before_script = re.split(r"\s\S+\.(?:sbatch|sh)\b", line)[0]
    if given := re.findall(r"\s--signal[= ](\S+)", before_script):
        return str(given[-1])
    if given_by_variable := os.environ.get("SBATCH_SIGNAL"):
        return given_by_variable
    script = _answer("scontrol", "write", "batch_script", job, "-")
    given = re.findall(r"^#SBATCH.*\s--signal[= ](\S+)", script, re.MULTILINE)
    return given[-1] if given else ""


@on_each_rank
def _signal_path(exam: Examination) -> Finding:
    """SIGUSR1, which the launcher gets as well as the ranks, does not end it."""
    if not in_job() or exam.launch.local_rank != 0 or not launcher_command():
        return Finding(NA, "no launcher in a job")
    status = Path(f"/proc/{parent_process()[0].pid}/status").read_text()
    masks = re.findall(r"Sig(?:Ign|Cgt):\s*(\w+)", status)  # of ignored and of caught signals: bit 0 is signal 1
    survives = any(int(mask, 16) >> (signal.SIGUSR1 - 1) & 1 for mask in masks)
    measured, expected = "SIGUSR1 ends the launcher, so that nothing is saved", "the launcher ignores it"
    advice = "Start it as the scripts in slurm/ do: bash -c 'trap \"\" USR1; exec accelerate launch …'"
    return judged(survives, measured, expected, advice, otherwise=FAIL)


def _job_record() -> str:
    """What Slurm says of this job; "" if it does not."""
    return _answer("scontrol", "show", "job", "--oneliner", os.environ["SLURM_JOB_ID"])


def _answer(*words: str) -> str:
    with contextlib.suppress(UserError):
        return ask(*words, seconds=3)
    return ""
