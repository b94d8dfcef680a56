"""Writes the stacks of all threads of this process and of its data workers to a file, when a run hangs."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from accel_train.data.worker_processes import stacks_file
from accel_train.errors import print_line

ANSWER_SECONDS = 0.2  # for a data worker to answer a signal


class Stacks:
    """Writes the stacks. Data workers write theirs into a file that they share with this process."""

    def write(self, path: Path, heading: str) -> None:
        """Write the stacks into the file `path`, below `heading`. An error is only a warning: the run ends anyway."""
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
            print_line(f"accel-train: warning: the stacks cannot be written: {error}", sys.__stderr__)

    def _of_worker(self, pid: int) -> str:
        """The stacks of a data worker, as text."""
        os.kill(pid, signal.SIGUSR2)
        time.sleep(ANSWER_SECONDS)
        file = stacks_file()
        file.seek(0)
        stacks = file.read().decode()
        file.seek(0)
        file.truncate()
        return stacks
