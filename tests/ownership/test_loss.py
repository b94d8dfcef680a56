"""A process that is lost while the run is claimed, before the watchdog begins."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import helpers
import pytest

KILLED = """
import os, signal, sys
from accel_train.cli import main
from accel_train.ownership.claim import Claim
Claim.attempt = lambda self: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.ci
def test_the_others_say_in_a_line_that_the_main_process_was_lost(tmp_path: Path) -> None:
    done = helpers.python("-c", KILLED, "digits", "--output-dir", tmp_path / "run", processes=2)
    assert done.returncode == -signal.SIGKILL
    (line,) = done.stderr.splitlines()
    assert f"{os.uname().nodename} has lost another process, which was killed or has failed" in line
