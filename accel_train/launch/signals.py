"""The signals that ask for a stop, recorded from the first moment of the program on.

Importing torch takes seconds. A cluster's warning that came during that time would kill the program, or be lost where
the job script ignores it. So it is recorded here, without torch, and `run.stopping.StopRequests` obeys it later.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WARNINGS = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that clusters send. Ctrl-C is not one of them: before there is something to save, it ends the program."""

_recorded: list[int] = []


@contextmanager
def recording_stop_signals() -> Iterator[None]:
    """Within this context a warning is recorded, whatever it did before (under the job scripts SIGUSR1 is ignored)."""
    before = {number: signal.signal(number, record_stop_signal) for number in WARNINGS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _recorded.clear()


def recorded_stop_signal() -> str:
    """The name of the latest warning that was recorded, or ""."""
    return signal.Signals(_recorded[-1]).name if _recorded else ""


def signal_to_job_script() -> str:
    """The name of the warning that the job script received during this start of the job, or ""."""
    start = os.environ.get("ACCEL_TRAIN_START", "")
    return "SIGUSR1" if start and Path(start, "warned").exists() else ""


def record_stop_signal(number: int, _frame: Any = None) -> None:
    """Record a warning; a signal's handler."""
    _recorded.append(number)
