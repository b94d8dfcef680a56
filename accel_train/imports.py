"""Imports of torch and of what stands on it take most of a start."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For imports of large packages, a quarter faster: Python looks for no garbage meanwhile.

    It would do so again and again, through all the functions and classes that are there already, and they stay.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
