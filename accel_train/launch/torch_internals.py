"""The parts of torch.distributed that have no public name in every supported version. Checked with torch 2.15.0.

tests/launch/test_internals.py fails if one of them disappears or changes its meaning.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import distributed


def set_collective_timeout(seconds: float, group: Any = None) -> None:
    """From now on a collective (of `group`) that takes longer raises an error; no effect on a single process.

    torch 2.15 has the public torch.distributed.set_timeout; in older versions the same function is `_set_pg_timeout`.
    """
    if distributed.is_initialized():
        set_timeout = getattr(distributed, "set_timeout", None) or distributed.distributed_c10d._set_pg_timeout
        set_timeout(timedelta(seconds=seconds), group)


def process_group_store() -> Any:
    """The store in which the processes of the default group meet. It has no public name, not even in torch 2.15."""
    return distributed.distributed_c10d._get_default_store()


def set_store_timeout(seconds: float) -> None:
    """Set how long a process waits in the process group's store for another process's first collective."""
    if distributed.is_initialized():
        process_group_store().set_timeout(timedelta(seconds=seconds))
