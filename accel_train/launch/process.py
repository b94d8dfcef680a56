"""This host, its cores, and whether a process still exists: a process number alone does not tell, as it is reused."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import platform
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import psutil

from accel_train.errors import print_line
from accel_train.files import open_to_write

ANSWER_SECONDS = 0.2  # for a data worker to answer a signal


def job_id() -> str:
    """The job of this process as its batch system names it: 123, 123_4 (of an array), 5[4].server (PBS); or ""."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:  # SLURM_JOB_ID of one element is the number of the whole array
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ.get('SLURM_ARRAY_TASK_ID', 0)}"
    return os.environ.get("SLURM_JOB_ID", os.environ.get("PBS_JOBID", ""))


WARNED, ENDED, CODE, RUN, NODES = "warned", "ended", "exit-code", "run", "nodes"
"""What is in `start_folder`: written by the script when the batch system warns of the job's end and when it ends the
job; by the first process that has ended, its exit code; by the run's owner, the run's folder; an empty file for each
node that a task has reached."""
MARKER = "REQUEUE"
"""A file there, and in the run's folder, that asks the job script to start the run again. It says the update."""


def start_folder() -> Path | None:
    """The folder through which a job script and its training talk, one for each start of the job; None without one.

    It is runs/starts/JOB/TIME, where JOB is the job, or under PBS the first of a chain of jobs.
    """
    folder = os.environ.get("ACCEL_TRAIN_START", "")
    return Path(folder) if folder else None


def tell_job_script(name: str, text: object) -> None:
    """Write a file for the job script, unless there is one already. Nothing fails if it cannot be written."""
    if (folder := start_folder()) is not None:
        with contextlib.suppress(OSError), open_to_write(folder / name, "xb") as file:
            file.write(f"{text}\n".encode(errors="surrogateescape"))


def available_cores() -> int:
    """Cores that this process may really use, not those that the machine has."""
    return len(core_set())


def core_set() -> set[int]:
    """The numbers of these cores."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def share_of_cores(mine: set[int], everyone: Sequence[set[int]]) -> int:
    """How many cores of `mine` are this process's part, where each is divided among those of `everyone` (the processes
    of this host, this one among them) that may use it: all of them where each process is bound to cores of its own."""
    return max(1, int(sum(1 / sum(core in each for each in everyone) for core in mine) + 1e-6))


def ranges(ranks: Iterable[int]) -> str:
    """Numbers for a message: 0-3,7."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def hostname() -> str:
    """The name of this host as the batch system knows it."""
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())


def machine_id() -> str:
    """An identifier of this boot of this host and, in a container, of the container's own process numbers.

    Process numbers can be compared only between processes with the same identifier.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        boot, namespace = f"{psutil.boot_time():.0f}", ""
    return f"{platform.node()} {boot} {namespace}".strip()


def start_time(pid: int) -> str:
    """When the process with that number began, for comparison only; "" if it does not exist or the system hides it."""
    return _zombie_and_start(pid)[1]


def has_ended(pid: int, started: str) -> bool:
    """Whether the process that had this number and start time (see `start_time`) has certainly ended."""
    if pid <= 0:  # these numbers mean groups of processes
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it belongs to another user
    is_zombie, current = _zombie_and_start(pid)
    return is_zombie or bool(current and started and current != started)


def _zombie_and_start(pid: int) -> tuple[bool, str]:
    """Whether a process is a zombie (it has ended, but its parent has not waited for it), and when it began."""
    try:
        if Path("/proc/self/stat").exists():
            # Not psutil: its create_time() is a time of day on Linux, and shifts when the clock is set. The kernel's
            # own number, in clock ticks since the boot, never changes (proc_pid_stat(5), field 22).
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return state in "ZX", fields[18]
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE, repr(process.create_time())
    except (OSError, LookupError, psutil.Error):
        return False, ""


@functools.cache
def stacks_file() -> IO[bytes]:
    """The file to which this process's data workers write their threads' stacks on SIGUSR2."""
    return tempfile.TemporaryFile()


def write_stacks(path: Path, heading: str) -> None:
    """Write the stacks of all threads of this process and of its data workers into the file `path`, below `heading`.

    An error is only a warning: the run ends anyway.
    """
    try:
        path.parent.mkdir(exist_ok=True)
        with open_to_write(path, "wb") as file:
            file.write(f"{heading}\n\n".encode())
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            for worker in multiprocessing.active_children():
                if worker.pid is not None:
                    os.kill(worker.pid, signal.SIGUSR2)
                    time.sleep(ANSWER_SECONDS)
                    stacks = stacks_file()
                    stacks.seek(0)
                    file.write(f"\n\ndata worker, process {worker.pid}\n\n".encode() + stacks.read())
                    stacks.seek(0)
                    stacks.truncate()
    except OSError as error:
        print_line(f"accel-train: warning: the stacks cannot be written: {error}", sys.__stderr__)
