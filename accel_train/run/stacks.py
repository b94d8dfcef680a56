"""What every thread of this process and of its data workers is doing, on paper: for a run that stands still."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from accel_train.data import workers
from accel_train.errors import print_line

ANSWER_SECONDS = 0.2  # a data worker's, to a signal


class Stacks:
    """Writes them; workers put theirs into a file that they have in common with this process."""

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
        file = workers.stacks_file()
        file.seek(0)
        found = file.read().decode()
        file.seek(0)
        file.truncate()
        return found
