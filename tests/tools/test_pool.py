"""The processes of check-data and shards: what they return, and that they end with the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import helpers
import psutil
import pytest

WORK = """
import os, time

def work(source, first, last, pause):
    open(os.path.join(os.path.dirname(__file__), f"{os.getpid()}.started"), "w").close()
    time.sleep(pause)
    return os.getpid(), source[first]
"""
COMMAND = """
import sys
from accel_train.tools.pool import in_processes
from work import work

for process, found in in_processes(work, [range(40)], [(0, i, i + 1) for i in range(40)], 2, float(sys.argv[1])):
    print(process, found, flush=True)
"""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, Any]:
    """Write the module of the work; return the environment in which it is found."""
    (tmp_path / "work.py").write_text(WORK)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))}


def test_results_come_in_the_order_of_the_jobs_from_both_processes(variables: dict[str, Any]) -> None:
    done = helpers.python("-c", COMMAND, 0.05, **variables)
    assert done.returncode == 0, done.stderr
    processes, found = zip(*(map(int, line.split()) for line in done.stdout.splitlines()), strict=True)
    assert found == tuple(range(40)) and len({*processes}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_processes_end_with_the_command(tmp_path: Path, variables: dict[str, Any], number: signal.Signals) -> None:
    command = psutil.Popen(
        [sys.executable, "-c", COMMAND, "1"], env=helpers.environment(**variables), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*.started"))) < 2:
        assert command.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    processes = command.children(recursive=True)
    command.send_signal(number)
    assert command.wait(20) == -number
    left = psutil.wait_procs(processes, timeout=10)[1]
    for process in left:
        process.kill()
    assert not left
