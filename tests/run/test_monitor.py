"""The monitor ends a process whose interpreter no longer answers, but not a suspended one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import helpers
import pytest

LIVES = """
import time
from accel_train.run.monitor import Monitor
monitor = Monitor()
for _ in range(6):
    monitor.expect(2)
    print("beat", flush=True)
    time.sleep(0.5)
monitor.close()
"""
HANGS = """
import ctypes
from accel_train.run.monitor import Monitor
monitor = Monitor()
monitor.expect(0)
monitor.expect(2)
ctypes.PyDLL(None).sleep(60)  # holds the interpreter's lock
"""


@pytest.mark.slow
def test_suspended_process_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", LIVES], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as popen:
        assert popen.stdout is not None
        popen.stdout.readline()
        family = helpers._family(popen.pid)
        assert len(family) == 2
        # a whole job; somebody alone, whose monitor runs on
        for suspended in (family, family[:1]):
            for process in suspended:
                os.kill(process, signal.SIGSTOP)
            time.sleep(3.5)
            for process in suspended:
                os.kill(process, signal.SIGCONT)
            popen.stdout.readline()
        output, _ = popen.communicate(timeout=60)
    assert (popen.returncode, set(output.split())) == (0, {b"beat"})


def test_process_that_holds_pythons_lock_is_ended_with_its_stacks() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGABRT
    assert "accel-train: error: Python has not answered for 2 s" in done.stderr
    assert 'File "<string>", line 7 in <module>' in done.stderr
    assert time.monotonic() - began > 2
