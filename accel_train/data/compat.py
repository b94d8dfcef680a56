"""The parts of Python's multiprocessing that its documentation does not have, checked with Python 3.11.

tests/test_compat.py uses each of them.
"""

from __future__ import annotations

import multiprocessing.util
import os
import sys
import tempfile
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext as ForkServerContext
from multiprocessing.context import ForkServerProcess
from types import ModuleType
from typing import Any

start_resource_tracker = resource_tracker.ensure_running
"""Start the process that removes what others have left in shared memory. Unblocks SIGINT and SIGTERM in this thread."""
start_fork_server = forkserver.ensure_running
"""Start this process's fork server, which imports the preloaded modules, unless it runs."""


_LONGEST = 107 - len("/pymp-12345678/listener-12345678")
"""Bytes of a folder's path in which multiprocessing can make its sockets: a socket's path has at most 107 (unix(7))."""


def shorten_socket_paths() -> None:
    """Let this process and its workers have their sockets in /tmp if the path of the folder for temporary files is too
    long. (Python 3.14 does so itself.) Raises OSError."""
    before = tempfile.gettempdir()
    if len(os.fsencode(before)) <= _LONGEST:
        return
    tempfile.tempdir = "/tmp"
    try:
        multiprocessing.util.get_temp_dir()  # makes a folder once; it is removed when this process ends
    finally:
        tempfile.tempdir = before


class ForkServerWorker(ForkServerProcess):
    """A process of the fork server that does not import the main module of the process that starts it."""

    ensure_server = staticmethod(start_fork_server)
    """Called before each start: the server may have ended."""

    @classmethod
    def _Popen(cls, process_obj: Any) -> Any:  # noqa: N802 -- multiprocessing's name
        """Start the process with an empty main module in place of this process's.

        multiprocessing would import the main module, the training script, in case a pickled object is defined there.
        None is.
        """
        cls.ensure_server()
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            return ForkServerProcess._Popen(process_obj)
        finally:
            sys.modules["__main__"] = main
