"""The host's memory: of the machine, of the job's control group, and what the job asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from accel_train.doctor.check import Check, Examination, Finding, judged, on_each_rank

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
LEAST = 2 * 2**30  # bytes for a process


@on_each_rank
def memory(exam: Examination) -> Finding:
    """The host's memory that the processes of a node may use."""
    total, limit = psutil.virtual_memory().total, memory_limit()
    usable = min(total, limit or total)
    each = usable / exam.hosts.count(exam.hosts[exam.launch.rank])
    found = f"{usable / 2**30:.1f} GiB a node, {each / 2**30:.1f} GiB a process"
    return judged(each >= LEAST, found, "2 GiB a process", "Ask for more: --mem, or --mem-per-cpu")


def memory_limit() -> int | None:
    """The smallest limit of the job's control groups and of Slurm for this node, in bytes; None: no limit."""
    limits = []
    for file in _limit_files():
        try:
            limits.append(int(file.read_text()))
        except (OSError, ValueError):  # "max"
            continue
    for name, count in (
        ("SLURM_MEM_PER_NODE", "1"),
        ("SLURM_MEM_PER_CPU", os.environ.get("SLURM_CPUS_ON_NODE", "")),
        ("SLURM_MEM_PER_GPU", os.environ.get("SLURM_GPUS_ON_NODE", "")),
    ):
        if os.environ.get(name, "").isdigit() and count.isdigit():  # in MiB; 0: all of the node's
            limits.append(int(os.environ[name]) * int(count) * 2**20)
    return min((limit for limit in limits if limit), default=None)


def _limit_files() -> Iterator[Path]:
    """The files with the limits of this process's control group and of all groups above it, of version 1 and 2."""
    try:
        lines = OWN_CGROUP.read_text().splitlines()
    except OSError:
        lines = ["0::/", "0:memory:/"]
    for line in lines:  # NUMBER:CONTROLLER,…:/PATH; version 2 has the number 0 and no controllers
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        while group != root and group.is_relative_to(root):
            yield group / name
            group = group.parent
        yield root / name  # in a container it is the only one that is seen


CHECKS = (Check("memory", memory, quick=True),)
