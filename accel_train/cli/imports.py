"""Imports of torch and of what stands on it take most of a start."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

from accel_train import __version__
from accel_train.launch.environment import is_first_process


@contextlib.contextmanager
def importing(what: str = "") -> Iterator[None]:
    """For imports of large packages, a quarter faster: Python looks for no garbage meanwhile.

    It would do so again and again, through all the functions and classes that are there already, and they stay. A
    person at a terminal is told at once that the program has begun, and with `what`: from a slow disk torch takes its
    time.
    """
    if what and sys.stderr.isatty() and is_first_process():
        print(f"accel-train {__version__}: {what}; importing torch …", file=sys.stderr, flush=True)
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
