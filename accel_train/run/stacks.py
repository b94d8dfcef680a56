"""What every thread of this process and of its data workers is doing, on paper: for a run that stands still."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from accel_train.errors import print_line

ANSWER_SECONDS = 0.2  # a data worker's, to a signal


class Stacks:
    """Make it before data workers are started: they are forked, and inherit the handler that answers for them."""

    def __init__(self) -> None:
        # faulthandler's own handler needs no Python, and so answers from a worker that is stuck, too.
        self._workers = tempfile.TemporaryFile()  # noqa: SIM115 -- stays open as long as the process lives
        faulthandler.register(signal.SIGUSR2, self._workers, all_threads=True)

    def write(self, path: Path, heading: str) -> None:
        """Into the file `path`, below `heading`. What cannot be written is a warning: the run ends in any case."""
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("w") as file:
                file.write(f"{heading}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                for worker in multiprocessing.active_children():
                    if worker.pid is not None:
                        file.write(f"\n\ndata worker, process {worker.pid}\n\n{self._of_worker(worker.pid)}")
        except OSError as error:
            print_line(f"accel-train: warning: no stacks can be written: {error}", sys.__stderr__)

    def _of_worker(self, pid: int) -> str:
        os.kill(pid, signal.SIGUSR2)
        time.sleep(ANSWER_SECONDS)
        self._workers.seek(0)
        found = self._workers.read().decode()
        self._workers.seek(0)
        self._workers.truncate()
        return found
