"""How many cores there are to use."""

from __future__ import annotations

import os
from collections.abc import Sequence


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
