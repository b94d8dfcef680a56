"""This host, and whether a process is still alive: its number does not say, for the system gives it away again."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path

import psutil


def hostname() -> str:
    """This host as the batch system calls it."""
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())


def machine() -> str:
    """Names this boot of this host and, in a container, its own set of process numbers.

    Process numbers mean the same only where this is the same.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        boot, numbers = f"{psutil.boot_time():.0f}", ""
    return f"{platform.node()} {boot} {numbers}".strip()


def started(pid: int) -> str:
    """When the process of that number began, for comparison only; "" if there is none or if the system hides it."""
    return _look(pid)[1]


def is_gone(pid: int, began: str) -> bool:
    """Whether the process that had this number, and began then (see `started`), has surely ended."""
    if pid <= 0:  # these mean groups of processes
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # another user's
    ended, found = _look(pid)
    return ended or bool(found and began and found != began)


def _look(pid: int) -> tuple[bool, str]:
    """Whether a process has ended though its parent has not asked for its exit code yet, and when it began."""
    try:
        if Path("/proc/self/stat").exists():
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return state in "ZX", fields[18]  # in clock ticks since the boot: no change of the clock alters it
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE, repr(process.create_time())
    except (OSError, LookupError, psutil.Error):
        return False, ""
