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

BAR = """
import sys
from accel_train.errors import print_line
from accel_train.tools.pool import progress_bar

with progress_bar("decoding", 156, shows_progress=True) as advance:
    print_line("a/very/long/path/" * 9 + "17.jpg cannot be read", sys.stderr)
    advance(156)
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


def test_a_bar_on_a_terminal_lets_lines_go_to_a_file(tmp_path: Path) -> None:
    master, slave = os.openpty()
    errors = tmp_path / "errors.txt"
    with errors.open("w") as file:
        environment = helpers.environment(TERM="xterm-256color")
        subprocess.run([sys.executable, "-c", BAR], env=environment, stdout=slave, stderr=file, check=True)
    os.close(slave)
    assert b"156/156" in os.read(master, 10000)
    os.close(master)
    assert errors.read_text() == "a/very/long/path/" * 9 + "17.jpg cannot be read\n"


@pytest.mark.parametrize("end", ["> /dev/full", "| true"])
def test_a_full_disk_or_a_closed_pipe_does_not_end_the_work(tmp_path: Path, end: str) -> None:
    (tmp_path / "bar.py").write_text(BAR + "open('done', 'w').close()\n")
    subprocess.run(f"{sys.executable} bar.py {end}", shell=True, cwd=tmp_path, env=helpers.environment(), check=True)
    assert (tmp_path / "done").exists()
