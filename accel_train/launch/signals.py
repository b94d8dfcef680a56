"""The signals that ask for a stop, from the first moment of the program on.

Importing torch takes seconds. A cluster's warning that came meanwhile would kill the program, or be lost where the job
script ignores it; so it is noted here, without torch, and `stopping.Stopping` obeys it later.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WARNINGS = (signal.SIGTERM, signal.SIGUSR1)
"""What clusters send. Ctrl-C is not among them: until there is something to save it ends the program at once."""

_noted: list[int] = []


@contextmanager
def noting() -> Iterator[None]:
    """Within it, a warning is noted, whatever it meant before (for SIGUSR1 under the job scripts: nothing)."""
    before = {number: signal.signal(number, note) for number in WARNINGS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _noted.clear()


def noted() -> str:
    """The name of the latest warning that was noted, or ""."""
    return signal.Signals(_noted[-1]).name if _noted else ""


def came_too_early() -> str:
    """The name of the warning that the job script has noted for this start of the job, or ""."""
    start = os.environ.get("ACCEL_TRAIN_START", "")
    return "SIGUSR1" if start and Path(start, "warned").exists() else ""


def note(number: int, _frame: Any = None) -> None:
    """A signal's handler."""
    _noted.append(number)
