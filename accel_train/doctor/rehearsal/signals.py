"""The way of the scheduler's warning: does SIGUSR1 reach the training's processes, or does it end their launcher?"""

from __future__ import annotations

import signal
import tempfile
import time
from pathlib import Path

from accel_train.doctor.check import FAIL, NOT_CHECKED, PASS, Check, Examination, Finding, on_each_rank
from accel_train.doctor.rehearsal.child import child_command, started
from accel_train.errors import one_line
from accel_train.launch.environment import in_job
from accel_train.launch.parent import launcher_command

MOST_PROCESSES = 8
WAIT_SECONDS = 5.0  # between the signal and its arrival
MODULE = "accel_train.doctor.rehearsal.listener"


@on_each_rank
def signal_path(exam: Examination) -> Finding:
    """SIGUSR1, sent to all processes of a launcher of the same kind, reaches each of its ranks."""
    if not in_job():
        return Finding(NOT_CHECKED, "not in a batch job: no scheduler warns of a time limit")
    if exam.launch.local_rank != 0:  # one of each node
        return Finding(PASS, "")
    if not launcher_command():
        return Finding(NOT_CHECKED, "the scheduler starts the processes without a launcher")
    with tempfile.TemporaryDirectory() as folder:
        return rehearse(min(exam.launch.local_world_size, MOST_PROCESSES), Path(folder), exam.seconds_left)


def rehearse(processes: int, folder: Path, patience: float) -> Finding:
    """Start the listeners, signal them, and say what they heard. `patience`: seconds until all of them listen."""
    expected = "SIGUSR1 reaches every process; the launcher stays"
    advice = "Start it with the scripts in slurm/, or: srun bash -c 'trap \"\" USR1; exec accelerate launch …'"
    try:
        command = child_command(processes, MODULE, str(folder))
    except ValueError as error:
        return Finding(NOT_CHECKED, str(error), expected)
    with started(command) as child:
        deadline = time.monotonic() + patience
        while _count(folder, "ready") < processes:
            if time.monotonic() > deadline or child.popen.poll() is not None:
                said = one_line((child.text().strip().splitlines() or [""])[-1], 100)
                return Finding(NOT_CHECKED, f"a second launcher did not start its processes: '{said}'", expected)
            time.sleep(0.02)
        child.send(signal.SIGUSR1)
        deadline = time.monotonic() + WAIT_SECONDS
        while _count(folder, "heard") < processes and time.monotonic() < deadline:
            time.sleep(0.02)
        heard = _count(folder, "heard")
        while child.popen.poll() is None and heard == processes and time.monotonic() < deadline:
            time.sleep(0.02)
        code = child.popen.poll()
        if code == -signal.SIGUSR1:
            return Finding(FAIL, "SIGUSR1 ends the launcher, so that nothing is saved", expected, advice)
        if heard < processes:
            return Finding(FAIL, f"SIGUSR1 reached {heard} of {processes} processes", expected, advice)
        return Finding(PASS, f"{heard} of {processes} processes of a second launcher", expected)


def _count(folder: Path, what: str) -> int:
    return len(list(folder.glob(f"{what}-*")))


CHECKS = (Check("signal-path", signal_path, seconds=15),)
