"""Ends this process if its Python interpreter no longer runs: from a second process, which needs none of its locks.

The watchdog is a thread. If another thread never releases the interpreter's lock, the watchdog stops, too.
faulthandler.dump_traceback_later would end such a process, but it goes by the clock: a job that was suspended for long
would be killed when it resumes, before the watchdog can renew the timer. This monitor counts its own turns of one
second. It is suspended together with the job, so that the time of a suspension does not count.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

TURN_SECONDS = 1.0
STACKS_SECONDS = 10.0  # for the process to write its stacks


class Monitor:
    """The second process, started by the process that it watches."""

    def __init__(self) -> None:
        faulthandler.enable(file=2)  # on SIGABRT it writes the stacks of all threads to stderr, without Python's lock
        self._process = subprocess.Popen(  # without this package and installed ones, so that it starts at once
            [sys.executable, "-I", "-S", __file__, str(os.getpid())],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)

    def expect(self, seconds: float) -> None:
        """Give a sign of life. The next one must come within this time; 0: at any time."""
        with contextlib.suppress(OSError, ValueError):  # the second process was killed or closed
            self._pipe.write(int(seconds / TURN_SECONDS).to_bytes(8, "little"))

    def close(self) -> None:
        """End the second process."""
        self._process.kill()
        self._process.communicate()


def _watch(process: int) -> None:
    """In the second process: end `process`, its parent, if it gives no sign of life for too long."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # sent to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    allowed = turns = 0
    while os.getppid() == process:
        if select.select([0], [], [], TURN_SECONDS)[0]:
            signs = os.read(0, 8 * 512)
            if not signs:
                return  # the parent has ended
            allowed, turns = int.from_bytes(signs[-8:], "little"), 0
        elif not _is_stopped(process):
            turns += 1
        if allowed and turns >= allowed:
            with contextlib.suppress(OSError):
                print(
                    f"accel-train: error: Python has not answered for {turns * TURN_SECONDS:.0f} s: a thread holds the "
                    "interpreter's lock. The stacks of all threads follow.",
                    file=sys.stderr,
                    flush=True,
                )
            os.kill(process, signal.SIGABRT)
            select.select([0], [], [], STACKS_SECONDS)
            if os.getppid() == process:
                os.kill(process, signal.SIGKILL)
            return


def _is_stopped(process: int) -> bool:
    """Whether the process alone was suspended, not the whole job. Known on Linux only, from /proc.

    psutil would tell on other systems, too, but this process runs without installed packages.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
